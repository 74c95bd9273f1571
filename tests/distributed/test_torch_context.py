"""Arguments of torch's context parallel: buffers are sharded and put back, results are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import quorum_attention as qa
from quorum_attention import distributed

OWN = functional.scaled_dot_product_attention


def _attended(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _all_of_it(rank: int) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    x, places = torch.randn(2, 19, 16, dtype=torch.float64), torch.arange(19)
    weight = torch.randn(16, 48, dtype=torch.float64, requires_grad=True)
    rows = [slice(19 * r // ranks, 19 * (r + 1) // ranks) for r in range(ranks)][rank]
    for mask in (None, torch.randn(19, 19, dtype=torch.float64)):
        exact = _attended(x, weight, mask)
        (wanted,) = torch.autograd.grad(exact.square().sum(), weight)
        report = distributed.ShardedReport()
        given, own = x.clone(), places.clone()
        with distributed.context_parallel(
            mesh, buffers=[given, own], buffer_seq_dims=[1, 0], no_restore_buffers={own},
            report=report,
        ):  # fmt: skip
            assert torch.equal(given, x[:, rows])
            out = _attended(given, weight, mask)
            with qa.patched_sdpa(min_tokens=0):  # not of this rank's rows alone
                assert torch.equal(_attended(given, weight, mask), out)
            (grad,) = torch.autograd.grad(out.square().sum(), weight)
        dist.all_reduce(grad)
        assert torch.allclose(out, exact[:, rows], atol=1e-10)
        assert torch.allclose(grad, wanted, atol=1e-8)
        assert report.ranks == ranks
        assert torch.equal(given, x)
        assert torch.equal(own, places[rows])
        assert functional.scaled_dot_product_attention is OWN
    with pytest.raises(RuntimeError, match="inside"), distributed.context_parallel(mesh):
        raise RuntimeError("inside")
    assert functional.scaled_dot_product_attention is OWN


def _views(rank: int) -> None:
    """Buffers may share memory with each other and with what is no buffer."""
    batch, places = torch.arange(22).view(2, 11).clone(), torch.arange(10)
    buffers = [batch[:, :-1], batch[:, 1:], places[None].expand(2, -1)]
    wanted, rows = [b.clone() for b in buffers], slice(5 * rank, 5 * rank + 5)
    with distributed.context_parallel(
        dist.group.WORLD,
        buffers=buffers,
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers=[buffers[1]],
    ):
        assert all(torch.equal(b, w[:, rows]) for b, w in zip(buffers, wanted, strict=True))
        assert torch.equal(batch, torch.arange(22).view(2, 11))
    wanted[1] = wanted[1][:, rows]
    assert all(torch.equal(b, w) for b, w in zip(buffers, wanted, strict=True))
    assert torch.equal(batch, torch.arange(22).view(2, 11))
    assert torch.equal(places, torch.arange(10))
    assert buffers[0].data_ptr() == batch.data_ptr()


def _both(rank: int) -> None:
    _all_of_it(rank)
    _views(rank)
    _refusals(dist.new_group([rank], use_local_synchronization=True))


def _refusals(group: dist.ProcessGroup) -> None:
    x = torch.zeros(2, 5)
    for named, words in (
        ({"buffers": [x]}, "buffer_seq_dims"),
        ({"buffers": [x], "buffer_seq_dims": [2]}, "buffer_seq_dims"),
        ({"buffers": [x, x], "buffer_seq_dims": [0, 1]}, "twice"),
        ({"buffers": [x, torch.zeros(4)], "buffer_seq_dims": [1, 0]}, "same number of tokens"),
        ({"no_restore_buffers": {x}}, "no_restore_buffers"),
        ({"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [1]}, "gradient"),
        ({"buffers": [x.clone().requires_grad_() + 1], "buffer_seq_dims": [1]}, "gradient"),
    ):
        with pytest.raises(ValueError, match=words), distributed.context_parallel(group, **named):
            pass
    with pytest.raises(TypeError, match="mesh"), distributed.context_parallel(3):  # type: ignore[arg-type]
        pass


def test_on_processes(tmp_path: Path) -> None:
    spawn(_both, 2, tmp_path)
