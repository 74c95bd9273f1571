"""A real limit on the process's memory, and the allocator's own failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
import quorum_attention as qa
from quorum_attention.limits import data_bytes

folder, n, heads, dim = Path(sys.argv[1]), 8192, 8, 64
torch.set_num_threads(2)
shape = (1, heads, n, dim)

def mapped(name, mode="r+", shape=shape):
    return np.memmap(folder / name, np.float32, mode, shape=shape)

generator = torch.Generator().manual_seed(int(sys.argv[2]))
for name in "qkvg":
    mapped(name, "w+")[:] = torch.randn(shape, generator=generator).numpy()
for name in ("out", "dq", "dk", "dv"):
    mapped(name, "w+")
q, k, v, g = (mapped(name, "r") for name in "qkvg")
tensors = [torch.from_numpy(mapped(name)) for name in "qkvg"]
small = [t[:, :, :300].clone() for t in tensors]

# Threads, operators and the allocator warm up on something small.
torch.nn.functional.scaled_dot_product_attention(*small[:3])
o, l = qa.attention_with_lse(*small[:3], depth=1)
qa.attention_backward(small[3], *small[:3], o, l, depth=1)

# What comes back of a call without a place for its output is 16 MiB, four times.
budget = 12 << 20
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + budget, resource.RLIM_INFINITY))
said = {}
try:
    torch.nn.functional.scaled_dot_product_attention(*tensors[:3])
    said["torch"] = "worked"
except RuntimeError as error:
    said["torch"] = str(error)
try:
    qa.attention(*tensors[:3], depth=1)
    said["pinned"] = "worked"
except qa.OutOfMemoryError as error:
    said["pinned"] = str(error)
report = qa.Report()
out = mapped("out")
returned, lse = qa.attention_with_lse(q, k, v, budget=budget, out=out, report=report)
grads = tuple(mapped(name) for name in ("dq", "dk", "dv"))
qa.attention_backward(g, q, k, v, out, lse, budget=budget, grads=grads, report=report)
said["planned"] = [report.forward.planned_peak_bytes, report.backward.planned_peak_bytes]
said["budget"] = budget
print(json.dumps(said))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts like this on Linux")
def test_where_torch_runs_out_of_memory_attention_works_and_is_right(tmp_path: Path) -> None:
    """Forward and backward on memory-mapped inputs and results, within a real limit."""
    import random

    import numpy as np
    import torch

    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), str(seed)],
        capture_output=True, text=True, timeout=300, check=False,
        # Blocks on their own, so that freed ones are not kept to be handed out again. Tensors and
        # buffers of half a MiB too: of two threads they lie in the heap in another order each time,
        # and what it cannot give back differs by megabytes.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert "DefaultCPUAllocator" in said["torch"], said["torch"]
    # Without a place for its output the call cannot work either, and says so by type.
    assert "out of memory" in said["pinned"]
    assert max(said["planned"]) <= said["budget"]

    shape = (1, 8, 8192, 64)
    read = {
        name: torch.from_numpy(np.fromfile(tmp_path / name, np.float32)).reshape(shape)
        for name in ("q", "k", "v", "g", "out", "dq", "dk", "dv")
    }
    for head in (0, 7):
        q, k, v = (read[name][:, head].clone().requires_grad_() for name in ("q", "k", "v"))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        expected.backward(read["g"][:, head])
        for actual, wanted in (("out", expected), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            difference = (read[actual][:, head] - wanted).abs().max()
            assert difference <= 1e-5 * max(1.0, wanted.abs().max()), actual
