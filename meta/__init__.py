"""What the operators are: schemas, contract, fakes, the inference-only guard, FLOP formulas. No kernels.

Importing this package defines `torch.ops.tokenspeed.*`; `ts_ops.dispatch` adds the implementations.
"""

from .fake import register_fakes
from .flops import register_flops
from .schema import LIBRARY, NAMESPACE, OPERATORS, define_operators

__all__ = ["LIBRARY", "NAMESPACE", "OPERATORS"]

define_operators()
register_fakes()
register_flops()
