"""The backends: `reference` (plain torch) and `triton` (any GPU that Triton compiles for).

A backend is a module with
  `unavailable(device) -> str | None`   why it cannot run on that device at all (asked once a device),
  `why_not(name, problem) -> str | None`  why it cannot serve this problem; None or one sentence,
and a function for each operator it serves, which takes the checked problem and the output tensors.
`ts_ops/dispatch.py` imports a backend when it is first considered, so `import ts_ops` loads no kernel compiler.
"""
