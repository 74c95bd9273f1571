"""``recover``: what it enforces, what it measures and what it says are one thing."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers_processes import run_python

from quorum_attention.cli import child, main, recover
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.limits import PeakMemory, data_bytes, ran_out

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
    for tensor in create_tensors(str(folder / "inputs"), names).values():
        tensor.normal_()
    create_tensors(str(folder / "gradient"), {"grad_out": shape})["grad_out"].normal_()
    results = dict.fromkeys(("out", "grad_query", "grad_key", "grad_value"), shape)
    create_tensors(str(folder / "results"), {**results, "lse": (shape[0][:-1], shape[1])})
    return child.Spec(
        method, str(folder / "inputs"), str(folder / "gradient"), str(folder / "results"), "cpu",
        True, limit_bytes, 64 << 20, str(folder / "answer"), progress=False,
    )  # fmt: skip


def answered(folder: Path, spec: child.Spec) -> child.Answer:
    (folder / "spec").write_text(json.dumps(asdict(spec)))
    child.main(str(folder / "spec"))
    return child.Answer(**json.loads((folder / "answer").read_text()))


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
    # Four results of 4 MiB, and no more than tiles beside them: nothing of the process's own.
    assert 16 << 20 <= free["peak_bytes"] <= 26 << 20


def _both_calls_are_shown(said: str) -> None:
    for heading in ("forward: first", "forward: second", "backward: first", "backward: second"):
        (line,) = (line for line in said.splitlines() if heading in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        # torch has room for its output, and none for the gradients.
        assert (cells[1] == "-") == (heading != "forward: first")
        assert all(re.fullmatch(r"[0-9.]+ (us|ms|s)", cell) for cell in cells[2:]), line
    assert "torch, in its backward: " in said


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
    said = capsys.readouterr().out
    assert "│ ok " in said
    assert "2.00 MiB are left to the process" in " ".join(said.split())


@pytest.mark.parametrize("method", ["sdpa", "quorum"])
def test_nothing_is_imported_under_the_limit(tmp_path: Path, method: str) -> None:
    """What a first call imports is 30 MiB of the process's, and none of the call's."""
    spec = spec_for(tmp_path, method, None)
    (tmp_path / "spec").write_text(json.dumps(asdict(spec)))
    done = run_python(_IMPORTS, tmp_path / "spec")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"


_IMPORTS = """
import json, sys
from pathlib import Path
import torch
from quorum_attention.cli import child
spec = child.Spec(**json.loads(Path(sys.argv[1]).read_text()))
call = child._opened(spec, torch.device("cpu"))
child._warm_up(spec, call)
before = set(sys.modules)
child._make_calls(child._METHODS[spec.method](call), call, child.Answer(), None)
print(sorted(set(sys.modules) - before))
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

    class Fails(child._Sdpa):
        def forward(self, progress: object) -> None:
            if self._inputs[0].shape[-2] > child.WARM_TOKENS:
                raise error
            super().forward(None)

    monkeypatch.setitem(child._METHODS, "sdpa", Fails)
    answer = answered(tmp_path, spec_for(tmp_path, "sdpa", 1 << 30))
    assert answer.result == ("out of memory" if is_the_limit else "failed")
    assert type(error).__name__ in answer.error
    assert answer.stage == "forward", "it failed inside the call"


class Recorded(child._Sdpa):
    """Says what is done, in order, and where a limit begins."""

    done: ClassVar[list[str]] = []

    def __init__(self, call: child._Call) -> None:
        self.done.append("inputs placed")
        super().__init__(call)

    def forward(self, progress: object) -> None:
        self.done.append("forward")
        super().forward(None)

    def backward(self, progress: object) -> None:
        self.done.append("backward")
        super().backward(None)


def test_what_torch_reads_is_in_place_before_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it fails, where it fails, inside the attention call; and times are of the call."""
    monkeypatch.setattr(Recorded, "done", [])
    monkeypatch.setitem(child._METHODS, "sdpa", Recorded)

    class Limited(PeakMemory):
        def limit(self, extra_bytes: int) -> None:
            Recorded.done.append("limit")

    monkeypatch.setattr(child, "PeakMemory", Limited)
    answer = answered(tmp_path, spec_for(tmp_path, "sdpa", 1 << 30))
    twice = ["forward", "backward"] * 2
    assert Recorded.done == ["inputs placed", *twice, "inputs placed", "limit", *twice]
    assert len(answer.forward_seconds) == len(answer.backward_seconds) == 2


@pytest.mark.parametrize("method", ["sdpa", "quorum"])
def test_a_second_call_is_as_right_as_the_first_and_takes_no_more(
    tmp_path: Path, method: str
) -> None:
    answer = answered(tmp_path, spec := spec_for(tmp_path, method, None))
    assert answer.result == "ok", answer.error
    assert len(answer.forward_seconds) == len(answer.backward_seconds) == 2
    assert min(answer.forward_seconds + answer.backward_seconds) > 0
    inputs, results = open_tensors(spec.inputs), open_tensors(spec.results)
    leaves = [inputs[name].double().requires_grad_() for name in ("query", "key", "value")]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, open_tensors(str(spec.gradient))["grad_out"].double())
    for name, right in zip(
        ("out", "grad_query", "grad_key", "grad_value"), (out, *grads), strict=True
    ):
        torch.testing.assert_close(results[name].double(), right, rtol=1e-4, atol=1e-5)


def test_who_waited_long_for_the_first_call_gets_no_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "PATIENCE_SECONDS", 0.0)
    answer = answered(tmp_path, spec_for(tmp_path, "quorum", None))
    assert answer.result == "ok"
    assert len(answer.forward_seconds) == len(answer.backward_seconds) == 1
    monkeypatch.setattr(recover, "_child", lambda spec, path: answer)
    assert main(["recover", *SIZES, "--budget", "10MiB"]) == 1  # its results are of another call
    said = capsys.readouterr().out
    assert "no second one where the first took more than" in said
    assert re.search(r"│ backward: second +│ - ", said)


def test_a_process_that_dies_is_a_verdict_too(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, "no such method", 1 << 30)
    answer = recover._child(spec, tmp_path / "spec")
    assert answer.result == "failed"
    assert "ended with status 1" in answer.error


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
    answer = child.Answer(result="failed", error="an [error] said :smile:")
    monkeypatch.setattr(recover, "_child", lambda spec, path: answer)
    monkeypatch.setattr(recover, "_draw", lambda *_: None)
    sizes = ["--tokens", "256", "--heads", "1", "--device", "cpu", "--budget", "64MiB"]
    assert main(["recover", *sizes, "--forward-only"]) == 1
    said = capsys.readouterr().out
    assert 'pip install "quorum-attention[draw]"' in said
    assert "an [error] said :smile:" in said


def test_a_limit_is_lifted_again() -> None:
    before = data_bytes()
    with PeakMemory(torch.device("cpu")) as peak:
        peak.limit(1 << 30)
    assert len(bytearray(1 << 20)) == 1 << 20
    assert data_bytes() < before + (1 << 30)
