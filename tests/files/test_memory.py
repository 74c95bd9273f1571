"""Host memory is bounded, whatever the length: files and accumulators are larger than
what a process may have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

CHILD = """
import json, resource, sys
from pathlib import Path
import torch
from quorum_attention.cli import main

torch.set_num_threads(1)

def of_status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10

def both(folder, more):
    inputs = [str(folder / f"{name}.npy") for name in "qkv"]
    out, options = f"{folder}/results/", ["--device", "cpu", "--budget", "8MiB", "--json"]
    return main(["run", *inputs, out, "--lse", *options, *more]) or main(
        ["run", "--backward", *inputs, out, str(folder / "do.npy"), out, *options, *more])

# Operators, threads and imports are warm.
assert both(Path("small"), ["--depth", "1"]) == 0
data, anonymous = of_status("VmData"), of_status("RssAnon")
resource.setrlimit(resource.RLIMIT_DATA, (data + (24 << 20), resource.RLIM_INFINITY))
print(json.dumps({"code": both(Path("large"), [])}))
print(json.dumps({"anonymous": of_status("RssAnon") - anonymous}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA counts like this on Linux"
)
def test_a_call_of_several_times_the_memory(tmp_path: Path) -> None:
    """One head, so that nothing can be cut but tokens. 24 MiB of anonymous memory hold
    neither an accumulator (31 MiB) nor all inputs and results together (125 MiB)."""
    n_queries, n_keys, head_dim = 120_000, 200, 64
    rng = np.random.default_rng(0)
    sizes = {"q": n_queries, "k": n_keys, "v": n_keys, "do": n_queries}
    # Libraries make code for blocks of a size when they first meet it: some processors
    # have no memory for that within the limit, and the library ends the process.
    for folder, most in (("small", 4000), ("large", n_queries)):
        (tmp_path / folder).mkdir()
        for name, n in sizes.items():
            array = rng.standard_normal((1, 1, min(n, most), head_dim), np.float32)
            np.save(tmp_path / folder / f"{name}.npy", array.astype(np.float16))
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = "".join(done.stdout.splitlines()[-2:])
    assert '{"code": 0}' in said, (said, done.stderr)
    assert json.loads(done.stdout.splitlines()[-1])["anonymous"] < 24 << 20
    assert '"accumulators_in_file": true' in done.stdout
    # Some rows, and what all rows contribute to.
    q, k, v, do = (np.load(tmp_path / "large" / f"{name}.npy") for name in sizes)
    some = slice(60_000, 60_200)
    three = [
        torch.from_numpy(t[0, 0].astype(np.float64)) for t in (q[:, :, some], k, v)
    ]
    for tensor in three:
        tensor.requires_grad_()
    scores = three[0] @ three[1].T / head_dim**0.5
    wanted = torch.softmax(scores, -1) @ three[2]
    wanted.backward(torch.from_numpy(do[0, 0, some].astype(np.float64)))
    results = tmp_path / "large" / "results"
    close = {"atol": 3e-3, "rtol": 1e-2}
    out, lse, dq = (
        np.load(results / f"{name}.npy")[0, 0, some] for name in ("out", "lse", "dq")
    )
    np.testing.assert_allclose(out, wanted.detach(), **close)
    np.testing.assert_allclose(lse, torch.logsumexp(scores, -1).detach(), **close)
    np.testing.assert_allclose(dq, three[0].grad, **close)
    # The values' gradients are sums over all queries: each of them counts once.
    dv = np.load(results / "dv.npy")[0, 0].astype(np.float64)
    np.testing.assert_allclose(
        dv.sum(0), do[0, 0].astype(np.float64).sum(0), rtol=0.02, atol=2
    )
