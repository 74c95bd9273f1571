"""What importing costs, and what it leaves alone."""

from __future__ import annotations

import functools
import json

import pytest
from helpers_processes import run_python

# What somebody who imports this package has not asked for; some are not even installed.
ABSENT = (
    "triton", "matplotlib", "rich", "rich.progress", "transformers", "liger_kernel", "trl", "ray",
    "safetensors", "IPython", "quorum_attention.pictures", "quorum_attention.cli",
    "quorum_attention.bench", "quorum_attention.integrations", "torch._dynamo", "torch._inductor",
    "torch.nn.attention.flex_attention", "torch.distributed.tensor",
)  # fmt: skip
STEPS = {
    "the package": "import quorum_attention as qa",
    "every public name": "import quorum_attention as qa; [getattr(qa, n) for n in qa.__all__]",
    "a call": (
        "import quorum_attention as qa; q = torch.randn(1, 2, 200, 16);"
        "qa.attention(q, q, q); qa.attention(q, q, q, depth=1); qa.estimate(4096, device='cpu')"
    ),
}
CODE = """
import json, sys, time
import torch
before = set(sys.modules)
began = time.thread_time()
{step}
spent = time.thread_time() - began
print(json.dumps({{"seconds": spent, "modules": sorted(set(sys.modules) - before)}}))
"""


@functools.cache
def imported(step: str, again: bool = False) -> dict[str, object]:
    """What a step takes and loads, after torch."""
    done = run_python(CODE.format(step=STEPS[step]))
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def seconds(step: str, again: bool = False) -> float:
    return float(str(imported(step, again)["seconds"]))


def test_importing_adds_less_than_a_tenth_of_a_second() -> None:
    """Of this thread's own time, so that a busy machine makes no difference; usually a millisecond,
    because names are loaded when they are first used."""
    assert seconds("the package") < 0.1 or seconds("the package", again=True) < 0.1


@pytest.mark.parametrize("step", STEPS)
def test_what_is_not_used_is_not_loaded(step: str) -> None:
    modules = imported(step)["modules"]
    assert isinstance(modules, list)
    assert [name for name in ABSENT if name in modules] == []
