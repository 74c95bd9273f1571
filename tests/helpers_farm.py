"""Random calls on a farm, held against one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.farm import Farm
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.pool.report import PoolReport

BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


class Case:
    """A random call with what it gives on one device."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        batch, kv, share = draw.randint(1, 2), draw.randint(1, 2), draw.choice([1, 1, 2])
        n = draw.choice([1, 5, 40, 300, 600])
        m = n if draw.random() < 0.5 else draw.choice([1, 33, 200, 650])
        self.dtype = draw.choice(list(BOUNDS))
        self.inputs = [
            torch.randn(shape).to(self.dtype)
            for shape in (
                (batch, kv * share, n, 8),
                (batch, kv, m, 8),
                (batch, kv, m, 16),
                (batch, kv * share, n, 16),
            )
        ]
        self.options: dict[str, Any] = {
            "is_causal": draw.random() < 0.6,
            "enable_gqa": True,
            "scale": draw.choice([None, 0.3]),
        }
        self.chunks = draw.choice([None, 1, 3, 3, 7])
        self.compute()

    def compute(self) -> None:
        """What one device gives."""
        *three, grad = self.inputs
        out, lse = qa.attention_with_lse(*three, **self.options)
        grads = qa.attention_backward(grad, *three, out, lse, **self.options)
        self.wanted = dict(zip(NAMES, (out, lse, *grads), strict=True))

    def compare(self, got: dict[str, torch.Tensor]) -> None:
        for name, tensor in got.items():
            wanted = self.wanted[name]
            finite = torch.isfinite(wanted)
            assert torch.equal(tensor[~finite], wanted[~finite]), name
            a, b = tensor[finite].double(), wanted[finite].double()
            if a.numel():
                bound = BOUNDS[self.dtype] * b.abs().max().clamp_min(1.0)
                assert (a - b).abs().max() <= bound, name

    def in_memory(self, farm: Farm) -> PoolReport:
        report = PoolReport()
        *three, grad = self.inputs
        q, k, v = (t.clone().requires_grad_() for t in three)
        out = farm.attention(q, k, v, chunks=self.chunks, report=report, **self.options)
        out.backward(grad)
        named = zip(NAMES, (out.detach(), None, q.grad, k.grad, v.grad), strict=True)
        self.compare({name: tensor for name, tensor in named if tensor is not None})
        return report

    def in_files(self, farm: Farm, folder: Path) -> PoolReport:
        report = PoolReport()
        names = ("query", "key", "value", "grad")
        filled = create_tensors(
            folder / "in",
            {n: (tuple(t.shape), t.dtype) for n, t in zip(names, self.inputs, strict=True)},
        )
        for name, tensor in zip(names, self.inputs, strict=True):
            filled[name].copy_(tensor)
        given = open_tensors(folder / "in")
        three = [given[name] for name in names[:3]]
        made = create_tensors(
            folder / "out", {n: (tuple(t.shape), t.dtype) for n, t in self.wanted.items()}
        )
        more = {**self.options, "chunks": self.chunks, "report": report}
        farm.attention_with_lse(*three, out=made["out"], lse=made["lse"], **more)
        farm.attention_backward(
            given["grad"], *three, made["out"], made["lse"],
            grads=(made["grad_query"], made["grad_key"], made["grad_value"]), **more,
        )  # fmt: skip
        self.compare(made)
        assert sorted(path.name for path in folder.iterdir()) == ["in", "out"]
        for one in (report.forward, report.backward):
            assert one is not None
            assert one.copied_bytes == 0
        return report
