"""Random calls from files to files on a farm, held against one device; and Ray in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.devices.report import PoolReport
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.ray import Farm, cluster


class RayError(Exception):
    """Of tasks whose workers were lost too often."""


class RayTaskError(RayError):
    """Of tasks that raised something."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """In the place of Ray: a cluster of two CPUs, whose tasks run in this process and in any order
    when one is waited for.

    Args:
        draw: draws the order.
        dies: called before and after a task runs; if it says True, the worker dies then.
    """

    def __init__(
        self, draw: random.Random | None = None, dies: Callable[[Any], bool] = lambda unit: False
    ) -> None:
        self._draw, self._dies, self.exceptions = draw or random.Random(0), dies, self
        self.asked: list[object] = []
        self.results: dict[int, Any] = {}
        self._tasks: dict[int, Any] = {}

    RayError, RayTaskError = RayError, RayTaskError

    def is_initialized(self) -> bool:
        return bool(self.asked)

    def init(self, address: object, **options: object) -> None:
        self.asked.append(address)

    def shutdown(self) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {}}]

    def put(self, job: object) -> object:
        return job

    def remote(self, max_retries: int, **options: Any) -> Any:
        self._tries = max_retries + 1
        return lambda function: type(
            "Remote", (), {"remote": lambda *args: self._send(function, args)}
        )

    def _send(self, function: Any, args: tuple[Any, ...]) -> int:
        number = len(self._tasks) + len(self.results)
        self._tasks[number] = function, args
        return number

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float | None = None) -> Any:
        if timeout is not None:
            assert not self._tasks, "tasks run on though their call has failed"
            return refs, []
        ref = self._draw.choice(refs)
        function, args = self._tasks.pop(ref)
        self.results[ref] = RayError("its worker died")
        for _ in range(self._tries):
            if self._dies(args[1]):
                continue
            try:
                self.results[ref] = function(*args)
            except Exception as error:
                self.results[ref] = RayTaskError(error)
                break
            if not self._dies(args[1]):
                break
            self.results[ref] = RayError("its worker died")
        return [ref], []

    def get(self, ref: int) -> Any:
        found = self.results[ref]
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self, ref: int, force: bool) -> None:
        assert force
        self._tasks.pop(ref, None)


def fake_farm(ray: FakeRay | None = None, **options: Any) -> Farm:
    """A farm on a Ray in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ray_here", lambda: ray or FakeRay())
        return Farm(**options)


def in_files(
    path: Path, tensors: dict[str, torch.Tensor], *, writable: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors mapped from a new file, in their order."""
    made = create_tensors(path, {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        made[name].copy_(tensor)
    del made
    found = open_tensors(path, writable=writable)
    return {name: found[name] for name in tensors}


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

    def run(self, farm: Farm, folder: Path) -> PoolReport:
        """Both passes on a farm, compared; what they leave in the folder is an error."""
        report = PoolReport()
        names = ("query", "key", "value", "grad")
        given = in_files(folder / "in", dict(zip(names, self.inputs, strict=True)))
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
        for path in folder.iterdir():
            path.unlink()
        for one in (report.forward, report.backward):
            assert one is not None
            assert len(one.ran) == one.parts
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

    def run(self, farm: Farm, folder: Path) -> None:
        mask, options = self.mask, self.options
        wanted = list(qa.attention_with_lse(*self.inputs, mask, **options))
        wanted += qa.attention_backward(self.grad, *self.inputs, *wanted, mask, **options)
        names = ("query", "key", "value", "grad")
        given = in_files(folder / "in", dict(zip(names, (*self.inputs, self.grad), strict=True)))
        *three, grad = given.values()
        made = create_tensors(
            folder / "out",
            {n: (tuple(t.shape), t.dtype) for n, t in zip(NAMES, wanted, strict=True)},
        )
        more = {**options, "chunks": self.chunks}
        farm.attention_with_lse(*three, mask, out=made["out"], lse=made["lse"], **more)
        grads = (made["grad_query"], made["grad_key"], made["grad_value"])
        farm.attention_backward(
            grad, *three, made["out"], made["lse"], mask, grads=grads, **more
        )  # fmt: skip
        for name, one in zip(NAMES, wanted, strict=True):
            close = torch.allclose(made[name], one, atol=1e-9, rtol=1e-9)
            assert close, (name, self.mask, self.chunks)
        assert sorted(path.name for path in folder.iterdir()) == ["in", "out"]
        for path in folder.iterdir():
            path.unlink()
