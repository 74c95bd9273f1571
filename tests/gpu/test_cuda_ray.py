"""A farm whose units share one GPU: from files to files, in a budget, whoever is killed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import quorum_attention as qa
from quorum_attention.devices.report import PoolReport
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.ray import Farm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("ray") is None, reason="no GPU, or no Ray"
)

HALF = torch.float16
BUDGET = 256 << 20


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with Farm(num_cpus=1, num_gpus=0.5, budget=BUDGET) as made:
        yield made


class Call:
    """A causal call whose tensors are in files, and what one device makes of it."""

    def __init__(self, folder: Path, tokens: int, heads: int = 2, kv_heads: int = 1) -> None:
        self.folder = folder
        self.shape, small = (1, heads, tokens, 64), (1, kv_heads, tokens, 64)
        made = create_tensors(
            folder / "in",
            {"q": (self.shape, HALF), "k": (small, HALF), "v": (small, HALF),
             "do": (self.shape, HALF)},
        )  # fmt: skip
        for tensor in made.values():
            tensor.copy_(torch.randn(tensor.shape, dtype=HALF))
        self.inputs = open_tensors(folder / "in")
        self.options = {
            "attn_mask": qa.Mask(causal=True, window=(tokens // 2, 0), sinks=torch.randn(heads)),
            "enable_gqa": True,
        }
        q, k, v, grad_out = (self.inputs[n].cuda() for n in ("q", "k", "v", "do"))
        out, lse = qa.attention_with_lse(q, k, v, **self.options)
        grads = qa.attention_backward(grad_out, q, k, v, out, lse, **self.options)
        self.wanted = [out, lse, *grads]

    def by(self, farm: Farm, chunks: int | None) -> PoolReport:
        """Both passes on a farm, compared; what they left behind in the folder is an error."""
        path, report = self.folder / "out", PoolReport()
        q, k, v, grad_out = (self.inputs[n] for n in ("q", "k", "v", "do"))
        shapes = {"out": self.shape, "gq": self.shape, "gk": tuple(k.shape), "gv": tuple(v.shape)}
        lse = {"lse": (self.shape[:3], torch.float32)}
        made = create_tensors(path, {n: (shape, HALF) for n, shape in shapes.items()} | lse)
        options = {**self.options, "chunks": chunks, "report": report}
        farm.attention_with_lse(q, k, v, out=made["out"], lse=made["lse"], **options)
        farm.attention_backward(
            grad_out, q, k, v, made["out"], made["lse"],
            grads=(made["gq"], made["gk"], made["gv"]), **options,
        )  # fmt: skip
        found = [made["out"], made["lse"], made["gq"], made["gk"], made["gv"]]
        for got, wanted in zip(found, self.wanted, strict=True):
            error = (got.cuda().float() - wanted.float()).abs().max()
            assert error <= 6e-3 * wanted.abs().max().clamp_min(1.0).float()
        assert sorted(one.name for one in self.folder.iterdir()) == ["in", "out"]
        del made
        path.unlink()
        return report


@pytest.mark.parametrize("chunks", [1, 31])
def test_as_one_call(farm: Farm, tmp_path: Path, chunks: int) -> None:
    Call(tmp_path, 20_000).by(farm, chunks)


def test_tasks_keep_to_their_budget(farm: Farm, tmp_path: Path) -> None:
    """Their rows lie on the device, and what is left is the calls'."""
    report = Call(tmp_path, 150_000, 1).by(farm, 13)
    for passed in (report.forward, report.backward):
        assert passed is not None
        for one in passed.ran:
            made = one.report.forward or one.report.backward
            assert made is None or made.peak_bytes is None or made.peak_bytes <= BUDGET
