"""What a backend may round more coarsely to be faster: today the softmax weights of decode.

A permission, off by default: a backend without a kernel that uses it ignores it. `allow_fp8_weights` sets it for a
thread; the environment variable `TS_OPS_FP8_WEIGHTS` (0 or 1, read at import) is where every thread starts.
"""

import os

from .setting import Setting


def _permitted(setting: str) -> bool:
    if setting not in ("0", "1"):
        raise ValueError(f"TS_OPS_FP8_WEIGHTS must be 1 (allow) or 0 (the default), got {setting!r}")
    return setting == "1"


_fp8_weights = Setting(_permitted(os.environ.get("TS_OPS_FP8_WEIGHTS") or "0"))


def allow_fp8_weights(allow: bool = True):
    """Let backends keep the softmax weights of decode in FP8 (e4m3) inside the `with` block, in this thread.

    It concerns FP8 queries over an FP8 cache, whose weights are otherwise FP16. Faster on Hopper, with a larger error:
    about 1 % of the output's norm instead of 0.2 %. A backend that has no such kernel gives the same bits as without.

    Args:
        allow: False withdraws the permission, inside a block or an environment that gives it.

    Not for compiled code, where it raises: a graph does not carry the permission. Enter it around the call of the
    compiled function instead. A CUDA graph keeps what held when it was captured.

    Raises:
        TypeError: `allow` is no bool.
    """
    if not isinstance(allow, bool):
        raise TypeError(f"allow_fp8_weights: allow must be True or False, got {allow!r}")
    return _fp8_weights.changed(allow)


allow_fp8_weights._dynamo_forbidden = True  # set by hand for the reason given at `use_backend`


def fp8_weights_allowed() -> bool:
    """Whether the current thread allows FP8 softmax weights. Backends ask at each call."""
    return _fp8_weights.value
