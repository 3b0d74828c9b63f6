"""Which backend serves a call: chosen inside the operator at run time, so a compiled graph runs on any machine.

On CUDA the first backend of `PREFERENCE["cuda"]` that has no objection serves, on a CPU `reference`. `use_backend`
and the environment variable `TS_OPS_BACKEND` (read at import) force one; a forced backend that cannot serve raises
with its reason, and never hands over to another silently.
"""

import importlib
import logging
import os
from functools import cache, partial
from types import ModuleType

import torch

from .check import Guard, guarded
from .meta.call import functional, out_variant
from .meta.schema import LIBRARY, NAMESPACE, OPERATORS
from .setting import Setting

BACKENDS = ("tokenspeed", "hopper", "triton", "reference")
PREFERENCE = {"cuda": ("tokenspeed", "hopper", "triton"), "cpu": ("reference",)}
DISPATCH_KEYS = ("CPU", "CUDA")

log = logging.getLogger("ts_ops")
_environment = os.environ.get("TS_OPS_BACKEND")
_forced = Setting(None)  # or a backend's name
_announced: set[tuple] = set()


def use_backend(name: str):
    """Force one backend for the operators that the current thread runs inside the `with` block.

    Args:
        name: one of `ts_ops.dispatch.BACKENDS`.

    Not for compiled code, where it raises: a graph does not carry the choice. Enter it around the call of the
    compiled function instead.

    Raises:
        ValueError: no backend has that name.
    """
    _require_name(name, "use_backend")
    return _forced.changed(name)


# What `torch._dynamo.forbid_in_graph` sets. Calling that would import torch._dynamo, which takes seconds.
use_backend._dynamo_forbidden = True


def why_not(operator: str, problem) -> dict[str, str | None]:
    """For each backend: None if it can serve this checked problem, else the reason why not."""
    return {name: objection(name, operator, problem) for name in BACKENDS}


def serve(operator: str, problem, outputs: tuple[torch.Tensor, ...]) -> None:
    """Fill `outputs` with the first backend that can; nothing to do where there are no rows."""
    if problem.rows == 0:
        return
    chosen = _choose(operator, problem)
    if chosen is None:
        raise RuntimeError(_refusal(operator, problem, forced()))
    name, backend = chosen
    if (name, operator, problem.device) not in _announced:
        _announce(name, operator, problem, forced())
    getattr(backend, operator)(problem, *outputs)


def choice(operator: str, problem) -> str | None:
    """The backend that serves this checked problem, None if none does."""
    chosen = _choose(operator, problem)
    return chosen and chosen[0]


def forced() -> str | None:
    """The backend that `use_backend` or the environment forces in this thread."""
    return _forced.value or _environment


def compiled(device: torch.device) -> dict[str, int]:
    """How many variants of each kernel are compiled for `device`, by "backend:kernel"."""
    counts = {}
    for name, backend in _candidates(device, forced()):
        if count := getattr(backend, "compiled", None):
            counts |= {f"{name}:{kernel}": variants for kernel, variants in count(device).items()}
    return counts


def _choose(operator: str, problem) -> tuple[str, ModuleType | Guard] | None:
    for candidate in _candidates(problem.device, forced()):
        if candidate[1].why_not(operator, problem) is None:
            return candidate
    return None


@cache
def _candidates(device: torch.device, forced: str | None) -> tuple[tuple[str, ModuleType | Guard], ...]:
    """The backends to ask on this device, in order: those that can run on it at all. Guarded if TS_OPS_CHECK=1."""
    names = (forced,) if forced else PREFERENCE[device.type]
    return tuple((name, guarded(name, _backend(name))) for name in names if _backend(name).unavailable(device) is None)


def objection(name: str, operator: str, problem) -> str | None:
    """Why this backend cannot serve this checked problem; None if it can."""
    backend = _backend(name)
    return backend.unavailable(problem.device) or backend.why_not(operator, problem)


@cache
def _backend(name: str) -> ModuleType:
    _require_name(name, "TS_OPS_BACKEND")
    return importlib.import_module(f"ts_ops.backends.{name}")


def _announce(name: str, operator: str, problem, forced: str | None) -> None:
    _announced.add((name, operator, problem.device))
    order = PREFERENCE[problem.device.type]
    passed_over = () if forced else order[: order.index(name)]
    why = "; ".join(f"not {other}: {objection(other, operator, problem)}" for other in passed_over)
    log.info("%s.%s on %s is served by %s (%s)", NAMESPACE, operator, problem.device, name,
             "it was forced" if forced else why or "first choice")  # fmt: skip


def _refusal(operator: str, problem, forced: str | None) -> str:
    if forced:
        reason = objection(forced, operator, problem)
        return f"{NAMESPACE}::{operator}: the forced backend cannot serve this call. {forced}: {reason}"
    listed = " ".join(
        f"{name}: {reason or 'serves only when forced with ts_ops.use_backend'}."
        for name, reason in why_not(operator, problem).items()
    )
    return f"{NAMESPACE}::{operator}: no backend can serve this call. {listed}"


def _require_name(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(BACKENDS)}")


def register() -> None:
    for operator in OPERATORS:
        run = partial(serve, operator.name)
        for key in DISPATCH_KEYS:
            LIBRARY.impl(operator.name, functional(operator, run), key)
            if operator.outs:
                LIBRARY.impl(f"{operator.name}.out", out_variant(operator, run), key)
