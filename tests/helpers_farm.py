"""Random calls on a farm, held against one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices.report import PoolReport
from quorum_attention.farm import Farm
from quorum_attention.files import create_tensors, open_tensors

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


def every_third(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A rule of all four positions, that can be sent."""
    return (query * 2 + key * 5 + head + batch) % 3 != 0


def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return abs(query - key) < 40


def drawn_mask(draw: random.Random, batch: int, heads: int, n: int, m: int) -> Mask:
    """A mask of a few fields."""
    fields: dict[str, Any] = {}

    def some(name: str, make: Any, chance: float = 0.25) -> None:
        if draw.random() < chance:
            fields[name] = make()

    some("causal", lambda: draw.choice([True, "lower_right"]))
    some("offset", lambda: draw.randint(-m, m), 0.2)
    some("window", lambda: (draw.randint(-1, m), draw.randint(-1, m)))
    some("chunk", lambda: draw.randint(1, m))
    ids = [torch.randint(0, 3, (batch, size)).sort().values for size in (n, m)]
    some("documents", lambda: (ids[0], ids[1][: draw.choice([1, batch])]))
    some("key_lengths", lambda: torch.randint(0, m + 1, (batch,)))
    some("key_padding", lambda: torch.rand(m) < 0.7)
    some("keeps", lambda: draw.choice([every_third, near]))
    some("softcap", lambda: 2.0)
    some("either", lambda: (Mask(causal=True), Mask(keeps=near)), 0.15)
    some("sinks", lambda: torch.randn(heads), 0.4)
    shape = [draw.choice([1, size]) for size in (batch, heads, n, m)]
    some("bias", lambda: torch.randn(shape) if draw.random() < 0.5 else torch.rand(shape) < 0.8)
    return Mask(**fields)


class MaskedCase:
    """A random call under a mask, with its gradients, in fp64."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        batch, kv, share = draw.randint(1, 2), draw.randint(1, 2), draw.choice([1, 2])
        n = draw.choice([1, 5, 60, 150])
        m = n if draw.random() < 0.4 else draw.choice([1, 33, 170])
        shapes = (batch, kv * share, n, 8), (batch, kv, m, 8), (batch, kv, m, 16)
        self.inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        self.grad = torch.randn(batch, kv * share, n, 16, dtype=torch.float64)
        self.mask = drawn_mask(draw, batch, kv * share, n, m)
        self.options: dict[str, Any] = {
            "is_causal": draw.random() < 0.3, "enable_gqa": True, "scale": draw.choice([None, 0.3])
        }  # fmt: skip
        self.chunks = draw.choice([None, 1, 3, 7, 7, 13])
        if draw.random() < 0.2:
            self.chunks = draw.choice([None, 1])
            self.options |= {"dropout_p": 0.4, "dropout_seed": draw.randrange(1 << 40)}

    def compare(self, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        for got, one in zip(found, wanted, strict=True):
            assert torch.allclose(got, one, atol=1e-9, rtol=1e-9), (self.mask, self.chunks)

    def in_memory(self, farm: Farm) -> None:
        """With autograd, gradients of sinks too."""
        found: list[list[torch.Tensor]] = []
        calls: Any = ((qa.attention, {}), (farm.attention, {"chunks": self.chunks}))
        for attend, more in calls:
            leaves = [t.clone().requires_grad_() for t in self.inputs]
            learned = self.mask
            if learned.sinks is not None:
                leaves.append(learned.sinks.double().requires_grad_())
                learned = Mask(**{**vars(learned), "sinks": leaves[3]})
            out = attend(*leaves[:3], learned, **self.options, **more)
            out.backward(self.grad)
            found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
            assert len(found[-1]) == 1 + len(leaves)
        self.compare(found[1], found[0])

    def in_files(self, farm: Farm, folder: Path) -> None:
        """From files to files, with states in files where heads are cut."""
        three, mask, options = self.inputs, self.mask, self.options
        wanted = list(qa.attention_with_lse(*three, mask, **options))
        wanted += qa.attention_backward(self.grad, *three, *wanted, mask, **options)
        made = create_tensors(
            folder / "out",
            {n: (tuple(t.shape), t.dtype) for n, t in zip(NAMES, wanted, strict=True)},
        )
        more = {**options, "chunks": self.chunks}
        farm.attention_with_lse(*three, mask, out=made["out"], lse=made["lse"], **more)
        names = NAMES[2:]
        farm.attention_backward(
            self.grad, *three, made["out"], made["lse"], mask,
            grads=(made[names[0]], made[names[1]], made[names[2]]), **more,
        )  # fmt: skip
        self.compare(list(made.values()), wanted)
        assert [path.name for path in folder.iterdir()] == ["out"]
        (folder / "out").unlink()
