"""Promise: a malformed call raises before anything runs, and says the same wherever it is made (law 9).

`malformed.TABLE` makes the calls, by rule, over every argument of every overload. On real CPU tensors, FakeTensors and
meta tensors each raises the same type with the same text, which begins with the argument to blame and names the one
that is wrong. Under `torch.compile` Dynamo wraps an error of the same text, and on a GPU only the names of devices
differ. No backend is reached, and no argument is written.

Compiled are the first row of each rule for every argument of every overload or, with TS_OPS_ALL_MALFORMED=1, all rows.
"""

import os
import re
from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import calls
import malformed
import ts_ops
from malformed import TABLE, Row
from ts_ops import dispatch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET", allow_module_level=True)

VALID = [(operator, overload, base) for operator, overload in calls.OVERLOADS for base in malformed.bases(operator)]


def first_of_each_rule() -> list[Row]:
    first = {}
    for row in TABLE:
        first.setdefault((row.operator, row.overload, row.argument, row.rule), row)
    return list(first.values())


class Unreachable:
    """A backend without objections that must not be called."""

    why_not = staticmethod(lambda operator, problem: None)

    def __getattr__(self, operator):
        return lambda problem, *outputs: pytest.fail(f"{operator} reached a backend")


@pytest.fixture
def unreachable(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_candidates", lambda device, forced: (("reference", Unreachable()),))
    caplog.set_level("CRITICAL", "torch._subclasses.fake_tensor")  # which logs a traceback of every error


def failure(row: Row) -> tuple[type, str]:
    """Type and text of the error; the arguments stay as they were."""
    arguments = row.arguments()
    before = contents(arguments)
    with pytest.raises((ValueError, TypeError)) as caught:
        calls.invoke(row.operator, arguments, row.overload)
    assert contents(arguments) == before, f"{row}: an argument was written"
    return caught.type, str(caught.value)


def contents(arguments: dict) -> dict:
    """Version of every tensor and, where there is memory behind it, its bytes."""
    return {name: (value._version, bytes_of(value)) for name, value in arguments.items() if isinstance(value, Tensor)}


def bytes_of(tensor: Tensor) -> list[int] | None:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return None
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def without_devices(text: str) -> str:
    return re.sub(r"\b(cpu|meta|cuda(:\d+)?)\b", "DEVICE", text)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_same_error_on_every_kind_of_tensor(row, unreachable):
    error, text = failure(row)
    assert error is row.error
    assert row.describes(text), text
    with FakeTensorMode():
        assert failure(row) == (error, text)
    with torch.device("meta"):
        on_meta, meta_text = failure(row)
    if row.what == "elsewhere":
        text, meta_text = without_devices(text), without_devices(meta_text)
    assert (on_meta, meta_text) == (error, text)


@pytest.mark.parametrize(
    "row", TABLE if os.environ.get("TS_OPS_ALL_MALFORMED") == "1" else first_of_each_rule(), ids=str
)
def test_same_text_compiled(row, unreachable):
    _, text = failure(row)
    arguments = row.arguments()
    before = contents(arguments)
    with pytest.raises(TorchRuntimeError) as caught:
        calls.invoke_compiled(row.operator, arguments, row.overload, backend="eager")
    assert text in str(caught.value)
    assert contents(arguments) == before


@pytest.mark.parametrize("operator", calls.WITH_OUT)
def test_wrong_number_of_buffers(operator, unreachable):
    """Given to the public function; the operators themselves take each by name."""
    call = calls.example(operator)
    outs = tuple(calls.buffers(operator, call).values())
    for given in ((), outs[1:], (*outs, outs[0])):
        with pytest.raises(ValueError, match=rf"out must hold {len(outs)} .* got {len(given)}"):
            getattr(ts_ops, operator)(**call, out=given)


@pytest.mark.gpu
@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_same_text_on_gpu(operator, overload, unreachable):
    for row in TABLE:
        if (row.operator, row.overload) == (operator, overload):
            error, text = failure(row)
            with torch.device("cuda"):
                on_gpu, gpu_text = failure(row)
            assert (on_gpu, without_devices(gpu_text)) == (error, without_devices(text)), row


@pytest.mark.parametrize("operator, overload, base", VALID)
def test_unspoilt_calls_are_valid(operator, overload, base):
    """So nothing but what a rule spoils is wrong: on each kind of tensor, and compiled, the call goes through."""
    for context in (torch.device("cpu"), FakeTensorMode(), torch.device("meta")):
        with context:
            calls.invoke(operator, malformed.valid(operator, overload, base), overload)
    calls.invoke_compiled(operator, malformed.valid(operator, overload, base), overload, backend="eager")


@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_an_unspoilt_call_reaches_the_backend(operator, overload, unreachable):
    """So it means something that no row does."""
    with pytest.raises(pytest.fail.Exception, match=f"{operator} reached a backend"):
        calls.invoke(operator, malformed.valid(operator, overload, "bfloat16"), overload)


@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_shapes_are_those_of_the_valid_calls(operator, overload):
    for base in malformed.bases(operator):
        sizes = defaultdict(list)
        for name, value in malformed.valid(operator, overload, base).items():
            if isinstance(value, Tensor) and name != "k_scale":
                shape = malformed.shape_of(operator, name)
                actual = value.squeeze(1).shape if value.ndim > len(shape) else value.shape
                assert len(actual) == len(shape), name
                for token, size in zip(shape, actual):
                    sizes[token].append(size)
        for token, seen in sizes.items():
            (size,) = {*sizes.get(malformed.size_name(token), seen)}
            if token.startswith("~"):
                assert sum(seen) == size
            elif token.startswith(">="):
                assert min(seen) >= size
            else:
                assert {*seen} in ({size}, {size + 1} if token.endswith("+1") else {size})


@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_every_argument_is_spoilt(operator, overload):
    """By every rule that applies to it; a bool cannot be wrong."""
    made = {(row.argument, row.rule) for row in TABLE if (row.operator, row.overload) == (operator, overload)}
    for argument in calls.overload_of(operator, overload)._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if name in calls.BY_NAME[operator].outs:
            assert (name, "out_buffers") in made, name
        elif "Tensor" in kind:
            assert {(name, rule) for rule in ("dtypes", "ranks", "devices")} <= made, name
            assert (name, "strides") in made or name not in malformed.DENSE, name
        elif kind != "bool":
            assert (name, "numbers") in made or (name, "options") in made, name


def test_the_table_is_large():
    rows = Counter((row.operator, row.overload) for row in TABLE)
    assert rows.keys() == set(calls.OVERLOADS) and min(rows.values()) >= 40 and rows.total() >= 2000
