"""Fake implementations: the contract's checks and results without a kernel.

`mla_kv_cache_write` gets one too: the fake that torch makes up for an operator without results checks nothing.
"""

from torch.library import register_fake

from .call import functional, out_variant
from .schema import LIBRARY, NAMESPACE, OPERATORS


def register_fakes() -> None:
    def serve_nothing(problem, outputs):
        pass

    for operator in OPERATORS:
        name = f"{NAMESPACE}::{operator.name}"
        register_fake(name, functional(operator, serve_nothing), lib=LIBRARY)
        if operator.outs:
            register_fake(f"{name}.out", out_variant(operator, serve_nothing), lib=LIBRARY)
