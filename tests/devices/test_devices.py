"""``devices=`` of a call and ``Pool``: where tensors are, what is told, lost and
refused.

That results are right is in tests/test_conformance.py.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.masks import fifths
from helpers.plans import shape_of
from helpers.processes import until

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import devices as pools
from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices import Pool, PoolReport, partition
from quorum_attention.devices.coordinator import Coordinator
from quorum_attention.devices.messages import Compute, StoredHeads, WorkerPass
from quorum_attention.devices.shared_files import alloc_shared
from quorum_attention.devices.worker_loop import BlockWorker
from quorum_attention.devices.worker_mappings import WorkerMappings
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import HOST
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Keeps

TWO = ["cpu", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[Pool]:
    # The workers that ``devices=`` keeps have as many threads as this process.
    torch.set_num_threads(1)
    with Pool(TWO, threads=1) as made:
        yield made
    # Its socket would outlive the folder that the tests have for temporary files.
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


def near(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def gradients(
    devices: Any, tensors: list[torch.Tensor], **options: Any
) -> list[torch.Tensor]:
    """Output and gradients, also by way of the lse."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = qa.attention_with_lse(
        *leaves, enable_gqa=True, devices=devices, **options
    )
    (out.square().sum() + lse.sin().sum()).backward()
    return [
        out.detach(),
        lse.detach(),
        *(leaf.grad for leaf in leaves if leaf.grad is not None),
    ]


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_gradient_of_the_lse(pool: Pool, heads: int) -> None:
    shapes = (2, 3 * heads, 300, 8), (2, heads, 200, 8), (2, heads, 200, 16)
    tensors = [torch.randn(shape) for shape in shapes]
    found, wanted = (
        gradients(where, tensors, is_causal=True) for where in (pool, None)
    )
    assert len(found) == 5
    near(found, wanted)


@pytest.mark.parametrize("wanted", [{"exact_delta": True}, {"out_dtype": torch.float}])
def test_saturated_attention_has_exact_gradients(
    pool: Pool, wanted: dict[str, Any]
) -> None:
    """Workers round no output: gradients are those of one process."""
    q, k, v, grad_out = ((9 * torch.randn(1, 4, 64, 16)).bfloat16() for _ in "qkvg")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = []
    for devices in (None, pool):
        out = qa.attention(*leaves, is_causal=True, devices=devices, **wanted)
        grads.append(torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))
    for ours, expected in zip(*grads, strict=True):
        assert float((ours - expected).norm() / expected.norm()) < 4e-3


def test_by_their_names() -> None:
    """The workers are started once, and kept until they are closed."""
    q = torch.randn(1, 4, 200, 8).share_memory_()
    report = qa.Report()
    out, lse = qa.attention_with_lse(
        q, q, q, is_causal=True, devices=TWO, budget=["16MiB", "32MiB"], report=report
    )
    near([out, lse], qa.attention_with_lse(q, q, q, is_causal=True))
    kept = [
        w.process.pid for p in pools.shared_pools._pools.values() for w in p.workers
    ]
    grads = qa.attention_backward(out, q, q, q, out, lse, is_causal=True, devices=TWO)
    near(grads, qa.attention_backward(out, q, q, q, out, lse, is_causal=True))
    assert kept == [
        w.process.pid for p in pools.shared_pools._pools.values() for w in p.workers
    ]
    assert report.forward is not None
    made = report.pool.forward
    assert report.forward.n_groups == made.parts == len(made.ran)
    assert made.copied_bytes == 0
    assert {name.split()[0] for name in made.devices} == {"cpu"}
    assert "parts on 2 devices" in str(report)
    assert report.to_dict()["pool"]["forward"]["parts"] == made.parts
    assert report.total.forwards == 1
    leaf = q.clone().requires_grad_()
    out = qa.attention(leaf, q, q, is_causal=True, devices=TWO, report=report)
    pools.close()
    assert not pools.shared_pools._pools
    out.sum().backward()  # by other workers
    assert [report.pool.forward.copied_bytes, report.pool.backward.copied_bytes] == [
        q.nbytes
    ] * 2
    alone = q.clone().requires_grad_()
    qa.attention(alone, q, q, is_causal=True).sum().backward()
    near([leaf.grad], [alone.grad])
    pools.close()


def test_given_results_of_any_layout_and_progress(pool: Pool) -> None:
    q, k = torch.randn(2, 3, 4, 60, 8), torch.randn(2, 3, 2, 60, 8)
    out = torch.empty(60, 3, 2, 4, 8, dtype=torch.float64).permute(2, 1, 3, 0, 4)
    told: list[tuple[int, int, str]] = []
    options: dict[str, Any] = {"enable_gqa": True, "devices": pool}
    got = qa.attention(
        q, k, k, out=out, progress=lambda *said: told.append(said), **options
    )
    assert got is out
    wanted, lse = qa.attention_with_lse(q, k, k, enable_gqa=True)
    near([out.float()], [wanted])
    assert sorted(told) == told
    assert told[-1] == (told[-1][1], told[-1][1], "forward")
    grads = tuple(
        torch.empty(3, 2, 60, t.shape[2], 8).permute(1, 0, 3, 2, 4) for t in (q, k, k)
    )
    made = qa.attention_backward(wanted, q, k, k, wanted, lse, grads=grads, **options)
    assert all(a is b for a, b in zip(made, grads, strict=True))
    near(grads, qa.attention_backward(wanted, q, k, k, wanted, lse, enable_gqa=True))


def test_results_lie_as_the_query_does(pool: Pool) -> None:
    query, key = (torch.randn(2, 30, 4, 8).transpose(1, 2) for _ in range(2))
    out = qa.attention(query, key, key, devices=pool)
    assert out.stride() == query.stride()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_gradient_of_a_mask_without_autograd(
    pool: Pool, heads: int, given: bool
) -> None:
    """``grad_mask`` may be a tensor, also one with gaps."""
    q, grad = torch.randn(2, 1, 3, 90, 8)
    bias = torch.randn(heads, 90, 90)
    out, lse = qa.attention_with_lse(q, q, q, bias)
    target = torch.full((90, heads, 90, 2), 9.0)[..., 0].transpose(0, 1)
    wanted = qa.attention_backward(grad, q, q, q, out, lse, bias, grad_mask=True)
    got = qa.attention_backward(
        grad, q, q, q, out, lse, bias, grad_mask=target if given else True, devices=pool
    )
    assert not given or got[3] is target
    near(got, wanted)


def test_keys_that_no_row_sees_have_a_gradient_of_zero(pool: Pool) -> None:
    """Also in results that are given, whatever they hold."""
    q, k = torch.randn(1, 4, 100, 8), torch.randn(1, 4, 200, 8)
    out, lse = qa.attention_with_lse(q, k, k, is_causal=True)
    grads = tuple(torch.full_like(t, 7.0).share_memory_() for t in (q, k, k))
    given = (out, q, k, k, out, lse)
    near(
        qa.attention_backward(*given, is_causal=True, devices=pool, grads=grads),
        qa.attention_backward(*given, is_causal=True),
    )


@pytest.mark.slow
def test_autocast_and_compile(pool: Pool) -> None:
    q = torch.randn(1, 4, 100, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = (
            qa.attention(q, q, q, devices=devices) for devices in (pool, None)
        )
    torch.testing.assert_close(got, wanted, atol=3e-2, rtol=3e-2)
    compiled = torch.compile(
        lambda t: qa.attention(t * 2, t, t, devices=pool), backend="eager"
    )
    near([compiled(q)], [qa.attention(q * 2, q, q)])


@pytest.mark.slow
def test_a_worker_killed_in_the_middle() -> None:
    """Forward and backward: the others share what it was at, and another one joins."""
    tensors = [torch.randn(1, 6, 1500, 16) for _ in range(3)]
    wanted = gradients(None, tensors, is_causal=True)
    with Pool([*TWO, "cpu"], threads=1) as pool:
        for seconds in (0.01, 0.15):
            worker = next(worker for worker in pool.workers if worker.alive)
            pid: Any = worker.process.pid
            timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
            timer.start()
            for _ in range(4):
                near(gradients(pool, tensors, is_causal=True), wanted)
            timer.join()
            worker.process.join()
            near(gradients(pool, tensors, is_causal=True), wanted)
            assert len(pool.devices) == 2
            pool.add_device("cpu")
            report = PoolReport()
            pool.attention(*tensors, report=report)
            assert report.forward is not None
            assert len({one.device for one in report.forward.ran}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_stored_heads_of_a_lost_worker_are_not_computed_again(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first note its heads are overwritten, and the worker is killed: nobody
    writes to these heads again, and all others are right."""
    monkeypatch.setattr(partition, "_PIECES", 1)
    # A budget in which the dense kernel has one head at a time; a head takes longer
    # than notes are apart.
    options: dict[str, Any] = {"is_causal": True, "budget": "12MiB", "kernel": "dense"}
    q, k, v, grad_out = (torch.randn(1, 8, 3000, 16) for _ in "qkvg")
    out, lse = qa.attention_with_lse(q, k, v, is_causal=True)
    wanted: tuple[torch.Tensor, ...] = (out,)
    if backward:
        wanted = qa.attention_backward(grad_out, q, k, v, out, lse, is_causal=True)
    results = [alloc_shared(tuple(t.shape), t.dtype).fill_(torch.nan) for t in wanted]
    stored: list[slice] = []

    def kill_at_first_note(self: Coordinator, device: int, answer: Any) -> None:
        if isinstance(answer, StoredHeads) and not stored:
            first = self.queue.running[device].block.heads.start
            stored.append(slice(first, first + answer.count))
            for result in results:
                result[:, stored[0]] = 7.0
            self.workers[device].process.kill()
        take_answer(self, device, answer)

    take_answer = Coordinator._take_answer
    monkeypatch.setattr(Coordinator, "_take_answer", kill_at_first_note)
    report = qa.Report()
    with Pool(TWO, threads=1) as pool:
        options |= {"devices": pool, "report": report}
        if backward:
            grads: Any = tuple(results)
            qa.attention_backward(grad_out, q, k, v, out, lse, grads=grads, **options)
        else:
            qa.attention(q, k, v, out=results[0], **options)
    for result, right in zip(results, wanted, strict=True):
        assert (result[:, stored[0]] == 7.0).all()
        result[:, stored[0]] = right[:, stored[0]]
        near([result], [right])
    pool_pass = report.pool.backward if backward else report.pool.forward
    assert pool_pass.parts == len(pool_pass.ran) == 2
    assert "had been stored" in pool_pass.history[0]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_workers_killed_at_drawn_moments(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of results holds those of other inputs, which no row may keep."""
    draw = random.Random(torch.initial_seed())
    monkeypatch.setattr(partition, "_PIECES", 1)
    options = {"is_causal": True, "budget": "14MiB", "kernel": kernel}
    with Pool(TWO, threads=1) as pool:
        for _ in range(4):
            tensors = [torch.randn(1, h, 2000, 16) for h in (8, 4, 4)]
            wanted = gradients(None, tensors, is_causal=True)
            began = time.perf_counter()
            near(gradients(pool, tensors, **options), wanted)
            seconds = time.perf_counter() - began
            tensors = [t.flip(2) for t in tensors]
            wanted = gradients(None, tensors, is_causal=True)
            process = draw.choice(pool.workers).process
            timer = threading.Timer(draw.uniform(0.0, seconds), process.kill)
            timer.start()
            near(gradients(pool, tensors, **options), wanted)
            timer.join()
            process.join()
            pool.restart_lost()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([], "at least one"),
        ("tpu", "devices"),
        (["cuda:99"], "CUDA device"),
        ("all", "CUDA"),
    ],
)
def test_devices_that_are_not_here(devices: str | list[str], said: str) -> None:
    if torch.cuda.is_available() and devices == "all":
        pytest.skip("there are CUDA devices here")
    with pytest.raises(ValueError, match=said):
        Pool(devices)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"kernel": get_kernel("dense")}, NotImplementedError, "kernel must be a name"),
        ({"kernel": "longnet"}, Exception, "longnet"),
        ({"attn_mask": Mask(keeps=lambda b, h, q, k: q >= k)}, NotImplementedError, "Mask.keeps"),
        ({"attn_mask": Mask(key_padding=torch.ones(8, dtype=torch.bool))}, ValueError, "padding"),
        ({"budget": [1, 2, 3]}, ValueError, "budget .* 2 devices, got 3"),
        ({"plan": "plan"}, NotImplementedError, "plan is for one device"),
        ({"depth": -1}, ValueError, "depth"),
        ({"budget": 1}, BudgetError, "budget"),
    ],
)  # fmt: skip
def test_what_several_cannot_do_is_refused_and_workers_stay(
    pool: Pool, options: dict[str, object], kind: type[Exception], says: str
) -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(kind, match=says):
        qa.attention(q, q, q, devices=pool, **options)  # type: ignore[arg-type]
    assert len(pool.devices) == 2
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda t: qa.attention(t, t, t, devices=pool))(torch.stack([q, q]))


width = 5


def close(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A rule that reads a number of this module."""
    return (q - k).abs() < width


@pytest.fixture
def absent() -> Iterator[Keeps]:
    """A rule of a module that this process alone has."""
    module = types.ModuleType("made_up_rules")
    exec("def later(b, h, q, k):\n    return q >= k", module.__dict__)
    sys.modules["made_up_rules"] = module
    yield module.later
    sys.modules.pop("made_up_rules", None)


def test_a_rule_that_workers_cannot_import_is_refused_by_name(
    pool: Pool, absent: Keeps
) -> None:
    q = torch.randn(1, 2, 40, 8)
    with pytest.raises(NotImplementedError, match=r"Mask.keeps .*made_up_rules"):
        qa.attention(q, q, q, Mask(keeps=absent), devices=pool)
    even = Mask(keeps=fifths)
    near([qa.attention(q, q, q, even, devices=pool)], [qa.attention(q, q, q, even)])


def test_a_number_that_differs_in_a_worker_is_an_error(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's number is changed in this process alone: its workers would keep other
    pairs."""
    q = torch.randn(1, 2, 40, 8)
    wanted = qa.attention(q, q, q, Mask(keeps=close))
    near([qa.attention(q, q, q, Mask(keeps=close), devices=pool)], [wanted])
    monkeypatch.setitem(globals(), "width", 9)
    with pytest.raises(RuntimeError, match=r"close.* keeps other pairs in a worker"):
        qa.attention(q, q, q, Mask(keeps=close), devices=pool)
    monkeypatch.undo()
    near([qa.attention(q, q, q, Mask(keeps=close), devices=pool)], [wanted])


class Near:
    """A mask's function that is an object."""

    width = 9

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q - k).abs() < self.width


def test_gradients_are_of_the_numbers_of_the_forward(pool: Pool) -> None:
    """Workers get the function as it was then, so a number may change before the
    backward, and no warning says that it did."""
    grads: list[torch.Tensor | None] = []
    for width_after in (9, 2):
        keeps = Near()
        torch.manual_seed(0)
        q = torch.randn(1, 2, 40, 8, requires_grad=True)
        keeps.width = 9
        out = qa.attention(q, q, q, Mask(keeps=keeps), devices=pool)
        keeps.width = width_after
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out.square().sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(*grads)


def test_memory_of_a_pass_is_let_go_of() -> None:
    with Pool("cpu", threads=1) as pool:
        maps = Path(f"/proc/{pool.workers[0].process.pid}/maps")

        def mapped() -> int:
            return maps.read_text(encoding="utf-8").count("memfd:quorum-attention")

        q = torch.randn(1, 2, 100, 8)
        qa.attention(q, q, q, devices=pool)
        assert mapped() > 0  # the next pass may read it again
        del q
        gc.collect()
        until(lambda: not mapped(), 10)
        q = torch.randn(1, 2, 100, 8)
        assert torch.allclose(
            qa.attention(q, q, q, devices=pool), qa.attention(q, q, q), atol=1e-5
        )


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytearray(1 << 60),
        lambda: mmap.mmap(-1, 1 << 60),
    ],
)
def test_memory_that_runs_out_beside_the_call_gives_the_part_back_too(
    fail: Callable[[], object],
) -> None:
    """Where it opens tensors, or makes room for a gradient: torch's allocator for the
    CPU raises a plain RuntimeError there."""

    class Scarce(WorkerMappings):
        def open(self, handle: Any) -> torch.Tensor:
            fail()
            raise AssertionError

    block = CallBlock(Interval(0, 1), Interval(0, 1), Interval(2, 6), Interval(0, 6))
    tensors: Any = {"query": None}
    spec = WorkerPass(1, True, WholeCall(shape_of((1,), 2, 2, 6, 6)), tensors=tensors)
    said = BlockWorker(HOST, Scarce(), print).answer(Compute(spec, block))
    assert said.is_out_of_memory
    assert not said.is_broken
