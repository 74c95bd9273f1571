"""The first call of a process may be inside a checkpoint, under hooks, or in any mode of torch's:
what it tries and keeps is what any other call would, and the caller's modes see none of it."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
from helpers_first_calls import MODES
from helpers_processes import run_python

TESTS = Path(__file__).parent
KERNELS = ("dense", "score_mod", "function", "window", "keeps")
# Inside these autograd, or what records it, takes part.
SOME = ("checkpoint", "hooks that count")
_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import helpers_first_calls
helpers_first_calls.main(*sys.argv[2:4], "cpu", sys.argv[4], 300, 16)
"""


@cache
def facts_after(mode: str, kernel: str, dtype: str = "float32") -> str:
    done = run_python(_RUN, TESTS, mode, kernel, dtype)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("nothing", "no_grad")])
def test_a_first_call_inside_any_mode(mode: str) -> None:
    assert facts_after(mode, "auto") == facts_after("nothing", "auto")


@pytest.mark.parametrize(("kernel", "mode"), list(zip(KERNELS, cycle(SOME), strict=False)))
def test_a_first_call_of_every_kernel(kernel: str, mode: str) -> None:
    assert facts_after(mode, kernel) == facts_after("nothing", "auto")


@pytest.mark.parametrize("mode", SOME)
def test_a_first_call_in_16_bits(mode: str) -> None:
    assert facts_after(mode, "auto", "bfloat16") == facts_after("nothing", "auto")
