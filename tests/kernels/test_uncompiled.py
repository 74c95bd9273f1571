"""torch.compile steps around these functions, and nobody else pays for torch's compiler."""

from __future__ import annotations

import pytest
from helpers_processes import run_python

SCRIPT = """
import sys
import torch
from quorum_attention.kernels.uncompiled import uncompiled

calls = []

@uncompiled
def twice(x, *, more=0):
    "Doubles."
    calls.append(torch.compiler.is_compiling())
    return 2 * x + more

before = torch.ones(3)
assert twice(before, more=1).tolist() == [3.0, 3.0, 3.0]
assert twice.__name__ == "twice" and twice.__doc__ == "Doubles."
LOADED = "torch._dynamo" in sys.modules
if sys.argv[1] == "plain":
    # Some builds of torch load it themselves.
    import subprocess
    own = "import torch, sys; print('torch._dynamo' in sys.modules)"
    own = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=True)
    assert str(LOADED) == own.stdout.strip()
else:
    graphs = []
    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward
    @torch.compile(backend=count)
    def user(x):
        return twice(x + 1).sin() + 1
    expected = (2 * (before + 1)).sin() + 1
    for _ in range(2):
        assert torch.equal(user(before), expected)
    assert len(graphs) == 2, graphs  # before it and after it
    assert calls == [False] * 3, calls
print("done")
"""


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_in_a_process_of_its_own(how: str) -> None:
    done = run_python(SCRIPT, how)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
