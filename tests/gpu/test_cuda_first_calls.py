"""The first call of a process on a GPU, in modes of the caller's: see
``test_traces.py``. All processes run at once, because each takes seconds to begin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

from quorum_attention.kernels.fa4 import version

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = (
    "cudnn",
    "flash",
    "efficient",
    "native",
    "score_mod",
    "function",
    "window",
    "keeps",
)
MODES = (
    "reentrant checkpoint", "hooks that raise", "save_on_cpu", "inference_mode", "anomaly mode",
    "autocast", "a default device", "a narrow default dtype", "compile",
)  # fmt: skip
KERNELS += ("fa4",) if version() else ()
CASES = [
    *zip(cycle(("checkpoint", "hooks that count")), KERNELS, strict=False),
    *((mode, "auto") for mode in ("checkpoint", *MODES)),
]
_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import helpers.first_calls
helpers.first_calls.main(*sys.argv[2:4], "cuda", "float16", 300, 64)
"""


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """Without anything that has been kept of earlier processes."""
    empty = str(tmp_path_factory.mktemp("caches"))
    caches = dict.fromkeys(("TRITON_CACHE_DIR", "QUORUM_ATTENTION_CACHE"), empty)
    tests = str(Path(__file__).parent.parent)
    started = {
        case: subprocess.Popen(
            [sys.executable, "-c", _RUN, tests, *case],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | caches,
        )
        for case in CASES
    }  # fmt: skip
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_first_call(
    running: dict[tuple[str, str], subprocess.Popen[str]], case: tuple[str, str]
) -> None:
    said, _ = running[case].communicate(timeout=120)
    assert not running[case].returncode, said[-3000:]
