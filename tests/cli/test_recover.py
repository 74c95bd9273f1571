"""``recover``: what it enforces, measures and says are one thing; its check sees
planted errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention.bench import child, methods
from quorum_attention.bench.limits import is_limit_error
from quorum_attention.bench.verification import sampled_errors
from quorum_attention.cli import main, recover

SIZES = ["--tokens", "2048", "--heads", "8", "--device", "cpu", "--causal"]
PROCESS = recover._PROCESS_BYTES


@pytest.fixture(autouse=True)
def pictures_go_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Children import what is tested, also where PYTHONPATH is relative.
    monkeypatch.setenv("PYTHONPATH", str(Path(child.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


def spec_for(method: str, limit_bytes: int | None) -> child.Spec:
    return child.Spec(
        method, 600, 2, 2, 32, "float32", True, backward=True, device="cpu",
        limit_bytes=limit_bytes, budget_bytes=64 << 20, repeats=1, check=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_smallest_budget_that_is_named_works_and_both_calls_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = recover._print

    def kept(*found: Any) -> None:
        shown(*found)
        print("and as JSON")
        recover._print_json(*found)

    monkeypatch.setattr(recover, "_print", kept)
    assert main(["recover", *SIZES, "--budget", "3MiB"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    smallest = re.search(r"smallest that works is ([0-9.]+MiB)", said)
    assert smallest is not None, said
    assert main(["recover", *SIZES, "--budget", smallest[1]]) == 0
    said, _, text = capsys.readouterr().out.partition("and as JSON\n")
    found = json.loads(text)
    # Plan, budget, limit and peak agree.
    limited, ours, free = found["methods"]
    assert limited["status"] == "out of memory"
    assert "can't allocate memory" in limited["reason"], (
        "it was torch's own memory that ran out"
    )
    assert ours["status"] == "ok"
    planned = [
        ours["report"][name]["planned_peak_bytes"] for name in ("forward", "backward")
    ]
    assert max(planned) <= found["budget_bytes"] - PROCESS
    assert ours["peak_bytes"] <= max(planned) + PROCESS
    # Four results of 4 MiB and tiles beside them, 10 to 11 MiB: nothing of the process
    # itself.
    assert 16 << 20 <= free["peak_bytes"] <= 32 << 20
    failed, came_back, errors, *price = said.splitlines()[1:]
    assert re.findall(r"(\w+) [0-9.]+e-0[6-9]", errors) == [
        "lse",
        "out",
        "dQ",
        "dK",
        "dV",
    ], errors
    assert re.match(
        r"torch within [0-9.]+ MiB: failed in its (forward|backward): ", failed
    )
    assert came_back.endswith("Matches float64 on sampled rows: yes.")
    for heading in (
        "first forward",
        "second forward",
        "first backward",
        "second backward",
    ):
        (line,) = (line for line in price if heading in line)
        assert len(re.findall(r"[0-9.]+ (?:us|ms|s)\b", line)) == 2, line


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_the_limit"),
    [
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (with_cause(ImportError("half a module"), MemoryError()), True),
        (RuntimeError("sizes do not match"), False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_whatever_a_limited_process_raises_is_a_verdict(
    error: Exception, is_the_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_limit_error(error) == is_the_limit

    class Fails(methods.Method):
        def forward(self, call: methods.CallTensors) -> Any:
            if call.inputs[0].shape[-2] > child.WARM_TOKENS:
                raise error
            return super().forward(call)

    monkeypatch.setitem(methods.METHODS, "sdpa", Fails())
    answer = child.measure(spec_for("sdpa", 1 << 30))
    assert answer.status == ("out of memory" if is_the_limit else "failed")
    assert type(error).__name__ in answer.reason
    assert answer.stage == "forward", "it failed inside the call"


@pytest.mark.parametrize("of_a_file", [False, True])
def test_results_are_right_and_both_methods_get_the_same_inputs(
    of_a_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is wrong is called wrong."""
    spec = spec_for("quorum", None)
    if of_a_file:
        spec = replace(spec, inputs=str(tmp_path / "in.safetensors"))
        tensors = {
            name: torch.randn(1, 2, 600, 32) for name in ("query", "key", "value")
        }
        safetensors.torch.save_file(tensors, spec.inputs)
    answer = child.measure(spec)
    assert answer.status == "ok", answer.reason
    assert set(answer.errors) == {"lse", "out", "grad_query", "grad_key", "grad_value"}
    assert all(error < 1e-5 for (error,) in answer.errors.values())
    one, other = (child._drawn_call(spec, on_device, 0) for on_device in (False, True))
    for mine, its in zip(
        (*one.inputs, one.grad), (*other.inputs, other.grad), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    backward = methods.Method.backward
    monkeypatch.setattr(
        methods.Method,
        "backward",
        lambda *given: [t.mul_(1.1) for t in backward(*given)],
    )
    errors = child.measure(spec).errors
    assert errors["out"][0] < 1e-5
    assert errors["grad_key"][0] == pytest.approx(0.1, rel=0.1)


@pytest.mark.slow
def test_the_peak_is_counted_from_where_the_limit_is() -> None:
    """So no peak is above its limit, and what comes after has its memory back."""
    done = subprocess.run(
        [sys.executable, "-c", _FILLS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, limit = json.loads(done.stdout.splitlines()[-1])
    assert limit - (8 << 20) <= peak <= limit


_FILLS = """
import json, time, torch
from quorum_attention.bench.limits import PeakMemory
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


NAMES = ("grad_query", "grad_key", "grad_value")


@pytest.mark.parametrize(
    "planted", ["nothing", "out", "lse", "grad_query", "grad_key", "grad_value"]
)
def test_planted_errors_are_seen(planted: str) -> None:
    query, grad = torch.randn(1, 4, 200, 8), torch.randn(1, 4, 200, 8)
    key, value = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 8)
    call = {"is_causal": True, "enable_gqa": True, "depth": 1, "devices": "cpu"}
    out, lse = qa.attention_with_lse(query, key, value, **call)
    grads = qa.attention_backward(grad, query, key, value, out, lse, **call)
    results = dict(zip(NAMES, grads, strict=True))
    results |= {"out": out.clone(), "lse": lse.clone()}
    if planted != "nothing":
        results[planted][0, 0, 0] += 1.0
    found = sampled_errors(
        (query, key, value), results["out"], results["lse"], grad,
        [results[name] for name in NAMES], is_causal=True,
    )  # fmt: skip
    # Keys and values are held against the result's own output and log-sum-exp.
    follows = {"out": {"grad_key"}, "lse": {"grad_key", "grad_value"}}.get(
        planted, set()
    )
    for name in results.keys() - follows:
        assert (found[name] > 1e-3) == (name == planted)
