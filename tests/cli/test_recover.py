"""``recover``: what it enforces, what it measures and what it says are one thing."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers_processes import run_python

from quorum_attention.bench import child, methods
from quorum_attention.cli import main, recover
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.limits import PeakMemory, ran_out

SIZES = ["--tokens", "2048", "--heads", "8", "--device", "cpu", "--causal"]
PROCESS = recover._PROCESS_BYTES


@pytest.fixture(autouse=True)
def pictures_go_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Children import what is tested, also where PYTHONPATH is relative.
    monkeypatch.setenv("PYTHONPATH", str(Path(child.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


def spec_for(folder: Path, method: str, limit_bytes: int | None, tokens: int = 600) -> child.Spec:
    shape = ((1, 2, tokens, 32), torch.float32)
    names = {"query": shape, "key": shape, "value": shape}
    files = tuple(str(folder / name) for name in ("inputs", "gradient", "results"))
    for tensor in create_tensors(files[0], names).values():
        tensor.normal_()
    create_tensors(files[1], {"grad_out": shape})["grad_out"].normal_()
    results = dict.fromkeys(("out", "grad_query", "grad_key", "grad_value"), shape)
    create_tensors(files[2], {**results, "lse": (shape[0][:-1], shape[1])})
    return child.Spec(
        method, backward=True, device="cpu", limit_bytes=limit_bytes, budget_bytes=64 << 20,
        repeats=1, files=files,
    )  # fmt: skip


def test_plan_budget_limit_and_peak_agree_and_both_calls_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, as_json = recover._print, []

    def kept(*found: Any) -> None:
        as_json.append(json.loads(json.dumps(recover._as_json(*found))))
        shown(*found)

    monkeypatch.setattr(recover, "_print", kept)
    assert main(["recover", *SIZES, "--budget", "10MiB"]) == 0
    (found,) = as_json
    _plan_budget_limit_and_peak_agree(found)
    _both_calls_are_shown(capsys.readouterr().out)


def _plan_budget_limit_and_peak_agree(found: dict[str, Any]) -> None:
    limited, ours, free = found["methods"]
    assert limited["result"] == "out of memory"
    assert "can't allocate memory" in limited["error"], "it was torch's own memory that ran out"
    assert ours["result"] == "ok"
    planned = [ours["report"][name]["planned_peak_bytes"] for name in ("forward", "backward")]
    assert max(planned) <= found["budget_bytes"] - PROCESS
    assert ours["peak_bytes"] <= max(planned) + PROCESS
    # Four results of 4 MiB and tiles beside them, 10 to 11 MiB: nothing of the process itself.
    assert 16 << 20 <= free["peak_bytes"] <= 32 << 20


def _both_calls_are_shown(said: str) -> None:
    failed, came_back, *price = said.splitlines()[1:]
    # torch has room for its output, and none for the gradients.
    assert failed.startswith("torch within 10.00 MiB: failed in its backward: ")
    assert came_back.endswith("Matches float64 on sampled rows: yes.")
    for heading in ("forward, first", "forward, second", "backward, first", "backward, second"):
        (line,) = (line for line in price if f"{heading} call" in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert all(re.fullmatch(r"[0-9.]+ (us|ms|s)", cell) for cell in cells[1:]), line
    assert max(map(len, (line for line in price if line.startswith("│")))) <= 62


def test_the_smallest_budget_that_is_named_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of torch without a limit nothing is asked here.
    monkeypatch.setattr(recover, "_affordable", lambda setting: False)
    assert main(["recover", *SIZES, "--budget", "3MiB"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    smallest = re.search(r"smallest that works is ([0-9.]+MiB)", said)
    assert smallest is not None, said
    assert main(["recover", *SIZES, "--budget", smallest[1]]) == 0
    assert "sampled rows: yes." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sdpa", "quorum"])
def test_nothing_is_imported_under_the_limit(tmp_path: Path, method: str) -> None:
    """What a first call imports is 30 MiB of the process's, and none of the call's."""
    done = run_python(_IMPORTS, json.dumps(asdict(spec_for(tmp_path, method, 1 << 30))))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"


_IMPORTS = """
import json, sys
from quorum_attention.bench import child
calls, before = child._calls, []
def watched(spec, *rest):
    before.append(set(sys.modules))
    calls(spec, *rest)
child._calls = watched
child.measure(child.Spec(**json.loads(sys.argv[1])))
assert len(before) == 2
print(sorted(set(sys.modules) - before[1]))
"""


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_the_limit"),
    [
        (SystemError("error return without exception set"), True),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (with_cause(ImportError("half a module"), MemoryError()), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("sizes do not match"), False),
        (with_cause(ValueError("x"), KeyError("y")), False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_whatever_a_limited_process_raises_is_a_verdict(
    error: Exception, is_the_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran_out(error) == is_the_limit

    class Fails(methods.Method):
        def forward(self, call: methods.Call) -> Any:
            if call.inputs[0].shape[-2] > child.WARM_TOKENS:
                raise error
            return super().forward(call)

    monkeypatch.setitem(methods.METHODS, "sdpa", Fails())
    answer = child.measure(spec_for(tmp_path, "sdpa", 1 << 30))
    assert answer.status == ("out of memory" if is_the_limit else "failed")
    assert type(error).__name__ in answer.reason
    assert answer.stage == "forward", "it failed inside the call"


class Recorded(methods.Method):
    """Says what is done, in order, and where a limit begins."""

    done: ClassVar[list[str]] = []

    def forward(self, call: methods.Call) -> Any:
        self.done.append("forward")
        return super().forward(call)

    def backward(self, call: methods.Call, state: Any) -> list[torch.Tensor]:
        self.done.append("backward")
        return super().backward(call, state)


def test_what_torch_reads_is_in_place_before_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it fails, where it fails, inside the attention call; and times are of the call."""
    monkeypatch.setattr(Recorded, "done", [])
    monkeypatch.setitem(methods.METHODS, "sdpa", Recorded())

    class Limited(PeakMemory):
        def limit(self, extra_bytes: int) -> None:
            Recorded.done.append("limit")

    opened = child._opened
    monkeypatch.setattr(child, "PeakMemory", Limited)
    monkeypatch.setattr(
        child, "_opened", lambda *given: Recorded.done.append("opened") or opened(*given)
    )
    answer = child.measure(spec_for(tmp_path, "sdpa", 1 << 30))
    twice = ["forward", "backward"] * 2
    assert Recorded.done == ["opened", *twice, "opened", "limit", *twice]
    assert len(answer.first_seconds) == 2
    assert len(answer.forward_seconds) == len(answer.backward_seconds) == 1


@pytest.mark.parametrize("method", ["sdpa", "quorum"])
def test_a_second_call_is_as_right_as_the_first_and_takes_no_more(
    tmp_path: Path, method: str
) -> None:
    answer = child.measure(spec := spec_for(tmp_path, method, None))
    assert answer.status == "ok", answer.reason
    assert min(answer.first_seconds + answer.forward_seconds + answer.backward_seconds) > 0
    inputs, gradient, results = (open_tensors(file) for file in spec.files)
    leaves = [inputs[name].double().requires_grad_() for name in ("query", "key", "value")]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, gradient["grad_out"].double())
    for name, right in zip(
        ("out", "grad_query", "grad_key", "grad_value"), (out, *grads), strict=True
    ):
        torch.testing.assert_close(results[name].double(), right, rtol=1e-4, atol=1e-5)


def test_who_waited_long_for_the_first_call_gets_no_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = child.measure(replace(spec_for(tmp_path, "quorum", None), patience=0.0))
    assert answer.status == "ok"
    assert len(answer.first_seconds) == 2
    assert not answer.forward_seconds
    monkeypatch.setattr(recover, "run_child", lambda spec: answer)
    assert main(["recover", *SIZES, "--budget", "10MiB"]) == 1  # its results are of another call
    assert re.search(r"│ backward, second call +│ +- ", capsys.readouterr().out)


def test_a_process_that_dies_is_a_verdict_too(tmp_path: Path) -> None:
    answer = child.run_child(replace(spec_for(tmp_path, "sdpa", 1 << 30), files=("a", "b", "c"),
                                     device="no device"))  # fmt: skip
    assert answer.status == "failed"


def test_the_peak_is_counted_from_where_the_limit_is() -> None:
    """So no peak is above its limit, and what comes after has its memory back."""
    done = subprocess.run(
        [sys.executable, "-c", _FILLS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, limit = json.loads(done.stdout.splitlines()[-1])
    assert limit - (8 << 20) <= peak <= limit


_FILLS = """
import json, time, torch
from quorum_attention.limits import PeakMemory
limit, kept = 64 << 20, []
with PeakMemory(torch.device("cpu")) as peak:
    early = torch.empty(10 << 20, dtype=torch.uint8)  # between the start and the limit
    peak.limit(limit)
    try:
        while True:
            kept.append(torch.empty(4 << 20, dtype=torch.uint8))
            time.sleep(0.01)
    except RuntimeError:
        pass
after = torch.empty(200 << 20, dtype=torch.uint8)
print(json.dumps([peak.peak_bytes, limit]))
"""


def test_brackets_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = child.Answer(status="failed", reason="an [error] said :smile:")
    monkeypatch.setattr(recover, "run_child", lambda spec: answer)
    monkeypatch.setattr(recover, "_draw", lambda *_: None)
    sizes = ["--tokens", "256", "--heads", "1", "--device", "cpu", "--budget", "64MiB"]
    assert main(["recover", *sizes, "--forward-only"]) == 1
    said = capsys.readouterr().out
    assert 'pip install "quorum-attention[draw]"' in said
    assert "an [error] said :smile:" in said
