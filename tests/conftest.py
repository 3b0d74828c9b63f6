"""Targets: the (backend, device) pairs that law tests run on.

- `reference`: plain torch on the CPU.
- `interpreter`: the Triton kernels on CPU tensors, in a process started with TRITON_INTERPRET=1. Triton then compiles
  nothing, so `make test` runs these in a process of their own. bf16 arithmetic and conversions to fp8 and bf16 are
  wrong in the interpreter, so those dtypes are left to the other targets.
- `tokenspeed`: the adapter onto the TokenSpeed kernels and the real `tokenspeed_mla`, on CPU tensors, with a model in
  place of the compiled kernels (`tokenspeed_model.py`). In the process that interprets, for the adapter's own launches.
  `tokenspeed-unsplit` is a machine so small that the package's planner never splits the keys.
- `gpu`: the Triton kernels on the first GPU; marked `gpu`, skipped without one.
- `hopper`: Hopper's decode on such a GPU; marked `gpu`, skipped on others. `hopper-fp8-weights` has every case in FP8
  and allows such weights.
- `blackwell`: the TokenSpeed kernels themselves; marked `blackwell`, skipped without such a GPU and the package.

A test that takes `target` runs on each; `target.backend` is forced while it runs. The TokenSpeed kernels take fewer
dtypes and dims and have two preconditions: `target.fit(case)` is the nearest case that they take, `target.refusal(...)`
the reason why there is none, and `target.outside` what memory outside a request may hold.
"""

import dataclasses
import functools
import math
import os
import secrets
from dataclasses import dataclass

import pytest
import torch

import calls
import tokenspeed_model
import ts_ops
from ts_ops import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Target:
    name: str
    backend: str
    device: str

    def supports(self, *dtypes: torch.dtype) -> bool:
        """False where the interpreter computes wrongly in one of these dtypes."""
        return self.name != "interpreter" or torch.bfloat16 not in dtypes

    @property
    def outside(self) -> float:
        """What cache memory and keys outside a request hold: NaN, but for kernels that multiply it by 0."""
        return 300.0 if self.backend == "tokenspeed" else math.nan

    def fit(self, case):
        """`case`, a dataclass of a law test, with the dims, dtypes and pages that the backend takes."""
        if self.backend not in ("tokenspeed", "hopper"):
            return case
        dims = {"rank": 512, "rope": 64, "dim_qk": 192, "dim_v": 128}
        changes = {name: dim for name, dim in dims.items() if hasattr(case, name)}
        if getattr(case, "query", None) == torch.float32:
            changes["query"] = torch.bfloat16
        if self.name == "hopper-fp8-weights" and hasattr(case, "query"):
            changes |= {"query": torch.float8_e4m3fn, "cache": None}
        if self.backend == "hopper" and hasattr(case, "page_size"):
            changes["page_size"] = max(32, case.page_size)
        if self.backend == "tokenspeed" and getattr(case, "dtype", None) in (torch.float32, torch.float16):
            changes["dtype"] = torch.bfloat16
        return dataclasses.replace(case, **changes)

    def skip_unless_it_has(self, operator: str) -> None:
        """Where the backend has no such operator, a test of it would be Triton's again."""
        if not hasattr(dispatch._backend(self.backend), operator):
            pytest.skip(f"{self.backend} has no {operator}")

    def refusal(self, operator: str, *args, **kwargs) -> str | None:
        """Why the backend does not serve this call."""
        return dispatch.why_not(operator, calls.PROBLEMS[operator](*args, **kwargs))[self.backend]


REFERENCE = Target("reference", "reference", "cpu")
INTERPRETER = Target("interpreter", "triton", "cpu")
TOKENSPEED = Target("tokenspeed", "tokenspeed", "cpu")  # 148 multiprocessors, so that most calls are split
UNSPLIT = Target("tokenspeed-unsplit", "tokenspeed", "cpu")  # 1, so that none is
GPU = Target("gpu", "triton", "cuda")
HOPPER = Target("hopper", "hopper", "cuda")
HOPPER_FP8_WEIGHTS = Target("hopper-fp8-weights", "hopper", "cuda")
BLACKWELL = Target("blackwell", "tokenspeed", "cuda")
NEED_THE_INTERPRETER = {"target", "install_tokenspeed", "interpreted"}
SERVED_BY_TOKENSPEED = ("test_laws_decode", "test_laws_prefill", "test_laws_pack")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Before Hypothesis loads the profile that was asked for: its definition, and a seed to print."""
    if config.getoption("--hypothesis-profile", None):
        import problems  # noqa: F401

        config.option.hypothesis_seed = config.option.hypothesis_seed or str(secrets.randbits(32))


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--hypothesis-profile", None):
        terminalreporter.write_line(f"replay with --hypothesis-seed={config.option.hypothesis_seed}")


def pytest_generate_tests(metafunc):
    if "target" not in metafunc.fixturenames:
        return
    cpu = [INTERPRETER] if INTERPRETED else [REFERENCE]
    params = [pytest.param(GPU, id=GPU.name, marks=pytest.mark.gpu)]
    if metafunc.module.__name__ == "test_laws_decode":
        params += [pytest.param(place, id=place.name, marks=pytest.mark.gpu) for place in (HOPPER, HOPPER_FP8_WEIGHTS)]
    if metafunc.module.__name__ in SERVED_BY_TOKENSPEED:
        cpu += [TOKENSPEED, UNSPLIT] if INTERPRETED else []
        params.append(pytest.param(BLACKWELL, id=BLACKWELL.name, marks=pytest.mark.blackwell))
    metafunc.parametrize("target", [pytest.param(target, id=target.name) for target in cpu] + params)


def pytest_collection_modifyitems(config, items):
    interpreted = [item for item in items if NEED_THE_INTERPRETER & set(getattr(item, "fixturenames", ()))]
    if INTERPRETED:
        config.hook.pytest_deselected(items=[item for item in items if item not in interpreted])
        items[:] = interpreted
    else:
        for item in interpreted:
            if "target" not in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason="runs with TRITON_INTERPRET=1"))
    hopper = {HOPPER.name, HOPPER_FP8_WEIGHTS.name}
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        elif not hopper.isdisjoint(item.keywords) and torch.cuda.get_device_capability() != (9, 0):
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))
        if "grid" in item.keywords and "grid" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes half an hour: run with `pytest -m grid`"))
        if "blackwell" in item.keywords and (reason := no_blackwell()):
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def no_blackwell() -> str:
    if torch.cuda.is_available():
        from ts_ops.backends import tokenspeed

        return tokenspeed.unavailable(torch.device("cuda:0")) or ""
    return "needs a GPU of compute capability 10.0, 10.3 or 10.7, and tokenspeed_mla"


@pytest.fixture(autouse=True)
def _forced_backend(request):
    if "target" not in request.fixturenames:
        yield
        return
    target = request.getfixturevalue("target")
    if target in (TOKENSPEED, UNSPLIT):
        request.getfixturevalue("install_tokenspeed")(sms=1 if target == UNSPLIT else 148)
    with ts_ops.use_backend(target.backend), ts_ops.allow_fp8_weights(target == HOPPER_FP8_WEIGHTS):
        yield


@pytest.fixture
def interpreted():
    """Triton's kernels run on CPU tensors: for a test of one of them, without a backend around it."""


@pytest.fixture
def install_tokenspeed(monkeypatch):
    """`tokenspeed_model.install`, undone after the test."""
    pytest.importorskip("tokenspeed_mla")
    yield functools.partial(tokenspeed_model.install, monkeypatch)
    monkeypatch.undo()
    tokenspeed_model.forget()


@pytest.fixture
def tokenspeed_machine(install_tokenspeed):
    """A machine of 148 multiprocessors whose calls the TokenSpeed adapter serves, with the model behind it."""
    machine = install_tokenspeed()
    with ts_ops.use_backend("tokenspeed"):
        yield machine


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Case of `tiny_models` -> folder with its checkpoint, written once a module."""
    from tiny_models import Folders  # which needs transformers

    return Folders(tmp_path_factory)


@pytest.fixture(scope="module")
def youtu():
    """A tiny model of a class in transformers that the adapter takes."""
    from tiny_models import YOUTU, build_member  # which need transformers

    return build_member(YOUTU)


@pytest.fixture
def prepared(youtu):
    from ts_ops.integrations.transformers import prepare

    with prepare(youtu) as prepared:
        yield prepared


@pytest.fixture(scope="module")
def one_thread():
    """Matrices of tiny models gain nothing from threads, and lose much where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
