"""The benchmark: right figures, recorded failures, whole tables; its children end with
it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.processes import until

import quorum_attention
from quorum_attention.bench import child
from quorum_attention.bench.experiments import EXPERIMENTS, spec_of
from quorum_attention.bench.measurement import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    UNSUPPORTED,
    Outcome,
    Spec,
)
from quorum_attention.bench.methods import RESULTS


def options(**others) -> Namespace:
    fields = {
        "device": "cpu", "heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32",
        "methods": ["sdpa", "quorum"], "lengths": (1024, 16384), "tokens": 300, "quick": False,
    }  # fmt: skip
    return Namespace(**{**fields, **others})


SPEC = spec_of(options(), "sdpa", 64)


def fast(seconds: float = 0.1) -> Outcome:
    found = Outcome(
        forward_seconds=[seconds], backward_seconds=[seconds], peak_bytes=1 << 20
    )
    found.errors = {name: [1e-4] * 2 for name in RESULTS}
    return found


def test_a_measurement_in_this_process() -> None:
    asked = spec_of(options(), "quorum-depth-1", 300, backward=True, repeats=2)
    found = child.measure(asked)
    assert found.status == OK, found.reason
    assert len(found.first_seconds) == len(found.forward_seconds) == 2
    assert len(found.backward_seconds) == 2
    assert found.report["backward"]["levels"] == (7,)
    for dtype, low, high in (("float32", 1e-8, 2e-6), ("float16", 1e-4, 2e-3)):
        found = child.measure(replace(asked, dtype=dtype, draws=2))
        assert set(found.errors) == set(RESULTS)
        assert all(
            len(e) == 2 and all(low < x < high for x in e)
            for e in found.errors.values()
        )
    found = child.measure(replace(asked, method="cudnn"))
    assert found.status == UNSUPPORTED
    assert "CUDA" in found.reason


@pytest.mark.slow
def test_whatever_a_process_does_is_an_answer() -> None:
    found = child.run_child(replace(SPEC, tokens=65_536, limit_bytes=1 << 20))
    assert found.status == OUT_OF_MEMORY, found.reason
    assert found.stage == "forward"
    found = child.run_child(SPEC, timeout=0.01)
    assert (found.status, found.reason) == (FAILED, "not done after 0.01 s")
    found = child.run_child(replace(SPEC, draws="no number"))
    assert found.status == FAILED
    assert "TypeError" in found.reason


def run(experiment: str, chosen: Namespace, rule) -> tuple[tuple, list[Spec]]:
    """The table of an experiment whose answers come from ``rule``, and what it asked
    for."""
    asked: list[Spec] = []

    def answer(experiment: str, spec: Spec) -> Outcome:
        asked.append(spec)
        return rule(spec)

    return EXPERIMENTS[experiment](chosen, answer), asked


def test_a_sweep_ends_with_a_method() -> None:
    """At its first failure, or before it takes too long."""

    def rule(spec: Spec) -> Outcome:
        if spec.method == "sdpa" and spec.tokens > 4096:
            return Outcome(OUT_OF_MEMORY)
        return fast(spec.tokens / 1024)

    (*_, rows), _ = run("cost", options(), rule)
    rows = [row for row in rows if row[2] == "both"]
    assert rows[:4] == [
        ["sdpa", "1,024", "both", "2", "1", "1.00 MiB"],
        ["sdpa", "2,048", "both", "4", "1", "1.00 MiB"],
        ["sdpa", "4,096", "both", "8", "1", "1.00 MiB"],
        ["sdpa", "8,192", "both", "oom", "", ""],
    ]
    assert [row[1] for row in rows[4:]] == [
        "1,024",
        "2,048",
        "4,096",
        "8,192",
        "16,384",
    ]
    _, asked = run("cost", options(quick=True), lambda spec: fast(spec.tokens / 1024))
    assert [s.tokens for s in asked if s.method == "sdpa"] == [1024, 2048]


@pytest.mark.parametrize("quick", [False, True])
def test_experiments_make_whole_tables(quick: bool) -> None:
    every: list[Spec] = []
    for name in EXPERIMENTS:
        chosen = options(quick=quick, lengths=(1024, 4096))
        (title, _, columns, rows), asked = run(name, chosen, lambda spec: fast())
        assert rows
        assert all(len(row) == len(columns) for row in rows), title
        every += asked
    assert len(set(every)) == len(every)


linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux ends them"
)
SOURCE = str(Path(quorum_attention.__file__).parents[1])
# The beginning of a child of ``recover``, which tells its number, and then works for
# long.
WORK = (
    child.CODE.partition("from quorum_attention.bench.child")[0]
    + """
import os, time

os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
)
PARENT = f"""
import os, subprocess, sys

subprocess.run([sys.executable, "-c", {WORK!r}, sys.argv[1] or str(os.getpid())])
"""


def start(parent: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", PARENT, parent]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@linux
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with start() as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: not alive(number), 60)


@linux
def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    with start("1") as parent:  # not the one that started it
        assert parent.communicate(timeout=120)[0] == ""


def alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
