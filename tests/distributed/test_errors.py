"""Ranks that do not agree, or of which one fails: none gets a wrong result without a
word, and none waits for good. And what torch's context parallel takes. All share two
processes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.attention import attention as textbook
from helpers.ranks import compare, inputs_of, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import quorum_attention as qa
from quorum_attention import Mask, attention
from quorum_attention import distributed as sharded
from quorum_attention.distributed.call import ShardedCall
from quorum_attention.kernels.native import NativeKernel


def _all_of_it(rank: int) -> None:
    group = dist.new_group([0, 1])
    for check in (
        _apart, _known_and_apart, _other_passes, _a_kernel_by_its_name,
        _kernels_that_are_refused, _context_parallel, _modules_of_torch,
        _buffers_that_share_memory, _one_rank_has_an_error, _asked_before_the_pass,
        _changed_before_the_backward, _inference_tensors,
    ):  # fmt: skip
        torch.manual_seed(0)
        check(rank, group)
    _buffers_that_are_refused(dist.new_group([rank], use_local_synchronization=True))
    _a_graph_does_not_keep_its_group()
    _one_fails(rank)


@pytest.mark.slow
def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 2, tmp_path)


def test_without_a_group() -> None:
    q = torch.randn(1, 2, 10, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        sharded.attention(q, q, q)


def _call(
    group: dist.ProcessGroup | None, heads: int = 4, rows: int = 12, **options: Any
) -> Any:
    dtype = options.pop("dtype", torch.float32)
    kv_heads, dim = options.pop("kv_heads", heads), options.pop("dim", 8)
    grad = options.pop("grad", True)
    q = torch.randn(1, heads, rows, dim, dtype=dtype, requires_grad=grad)
    k, v = (torch.randn(1, kv_heads, rows, dim, dtype=dtype) for _ in range(2))
    options = {"lengths": [12, 12], "enable_gqa": True, **options}
    return sharded.attention(q, k, v, group=group, **options)


# Of the one rank and of the other, and what is said.
APART: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"lengths": [13, 12]}, "do not agree on lengths"),
    ({"lengths": "equal"}, {"lengths": "equal", "rows": 11}, "do not agree on lengths"),
    ({}, {"lengths": None, "rows": 11}, "do not agree on lengths"),
    ({"dtype": torch.float16}, {"dtype": torch.bfloat16}, "dtype"),
    ({}, {"heads": 2, "dim": 16}, "heads"),
    ({}, {"kv_heads": 2}, "kv_heads"),
    ({}, {"is_causal": True}, "is_causal"),
    ({}, {"scale": 0.3}, "scale"),
    ({}, {"grad": False}, "gradients"),
    (
        {"grad": False, "attn_mask": torch.zeros(24, 24)},
        {"grad": False, "attn_mask": torch.zeros(24, 24, requires_grad=True)},
        "gradients",
    ),
    ({}, {"dropout_p": 0.5, "dropout_seed": 1}, "dropout_p"),
    ({"attn_mask": Mask(window=3)}, {"attn_mask": Mask(window=4)}, "attn_mask"),
    ({}, {"attn_mask": Mask(key_padding=torch.ones(12, dtype=torch.bool))}, "attn_mask"),
    (
        {"attn_mask": Mask(documents=torch.zeros(24, dtype=torch.int64))},
        {"attn_mask": Mask(documents=torch.zeros(12, dtype=torch.int64))},
        "documents",
    ),
    (
        {"attn_mask": Mask(documents=torch.zeros(24, dtype=torch.int64))},
        {"attn_mask": Mask(documents=torch.arange(24) // 5)},
        "pairs that attn_mask keeps",
    ),
]  # fmt: skip


def _apart(rank: int, group: dist.ProcessGroup) -> None:
    for one, other, words in APART:
        with pytest.raises(ValueError, match=words):
            _call(group, **(other if rank else one))
    # All of them heard of it, and the group is as good as before.
    torch.manual_seed(0)
    tensors = inputs_of(4, 2, 24, 8, 8, torch.float64, 1)
    for lengths in ([12, 12], "equal", [10, 14], [10, 14]):
        sizes = [12, 12] if isinstance(lengths, str) else lengths
        compare(rank, sizes, tensors, True, lengths=lengths, group=group)


def _known_and_apart(rank: int, group: dist.ProcessGroup) -> None:
    """Each rank makes a call on which both have agreed, and it is not the same one."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"is_causal": True}),  # messages of the same sizes
        ({"heads": 5, "kv_heads": 1}, {"heads": 5, "kv_heads": 1, "scale": 0.3}),
        ({"dropout_p": 0.5, "dropout_seed": 3}, {"dropout_p": 0.5, "dropout_seed": 4}),
    ]
    for one, other in pairs:
        for known in (one, other):
            _call(group, **known).sum().backward()
        with pytest.raises(ValueError, match="do not agree on"):
            _call(group, **(other if rank else one))


def _other_passes(rank: int, group: dist.ProcessGroup) -> None:
    """A backward on one rank, and on the other another call's, or a forward."""
    first, second = _call(group).sum(), _call(group, is_causal=True).sum()
    with pytest.raises(ValueError, match="do not agree on is_causal"):
        (second if rank else first).backward()
    first = _call(group).sum()
    with pytest.raises(ValueError, match="do not agree on call"):
        _call(group) if rank else first.backward(retain_graph=True)
    _call(group).sum().backward()


def _is_usable(rank: int, group: dist.ProcessGroup) -> None:
    """A call over the group is right, as before an error."""
    torch.manual_seed(0)
    tensors = inputs_of(4, 2, 24, 8, 8, torch.float64, 1)
    compare(rank, [12, 12], tensors, True, lengths="equal", group=group)


def _floats(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k).abs().float()


def _one_rank_has_an_error(rank: int, group: dist.ProcessGroup) -> None:
    """The other rank hears of the error, and does not wait for good."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dim": 0}, "head_dim"),
        ({"kernel": "none such"}, "none such"),
        ({"budget": "much"}, "much"),
        ({"attn_mask": 3}, "attn_mask"),
        ({"lengths": [11, 11]}, "lengths"),
        ({"report": 3}, "report"),
    ]
    # Found after the ranks have compared the call.
    mask = Mask(key_lengths=torch.tensor([24]), documents=torch.arange(12))
    far_mask = Mask(key_lengths=torch.tensor([25]), documents=torch.arange(12))
    no_mask = Mask(keeps=_floats, documents=torch.arange(12))
    good_mask = Mask(keeps=lambda b, h, q, k: q >= k, documents=torch.arange(12))
    pairs = [({}, options, text) for options, text in wrong]
    pairs += [
        ({"attn_mask": mask}, {"attn_mask": far_mask}, "key_lengths"),
        ({"attn_mask": good_mask}, {"attn_mask": no_mask}, "bool"),
        ({"attn_mask": mask}, {"attn_mask": mask, "kernel": "flash"}, "flash"),
    ]
    for wrong_rank in (0, 1):
        for right_options, options, text in pairs:
            if rank == wrong_rank:
                with pytest.raises(Exception, match=text) as raised:
                    _call(group, **options)
                assert "has an error" not in str(raised.value)
                continue
            with pytest.raises(ValueError, match=f"rank {wrong_rank} has an error"):
                _call(group, **right_options)
    _is_usable(rank, group)


class _WithoutGradients(NativeKernel):
    """It refuses calls that are recorded."""

    name = "without gradients"

    def refusal(self, shape: Any) -> str | None:
        return "it has no gradients" if shape.needs_grad else None


def _asked_before_the_pass(rank: int, group: dist.ProcessGroup) -> None:
    """A kernel that refuses the call, and a function that returns no bools, are errors
    before anything is sent: the group can be used afterwards. They failed in the
    pass."""
    documents = Mask(keeps=_floats, documents=torch.arange(24) // 5)
    refused: list[dict[str, Any]] = [
        {"kernel": "flash"},
        {"kernel": "cudnn", "dtype": torch.bfloat16, "heads": 5, "kv_heads": 1},
        {"kernel": "flash", "attn_mask": Mask(window=3)},
        {"kernel": _WithoutGradients()},
        {"attn_mask": Mask(keeps=_floats)},
        {"attn_mask": documents},
        {"attn_mask": documents, "kernel": "dense"},
    ]
    for options in refused:
        with pytest.raises(
            (NotImplementedError, TypeError), match=r"kernel|torch\.bool"
        ):
            _call(group, **options)
    with torch.no_grad(), pytest.raises(TypeError, match=r"torch\.bool"):
        _call(group, attn_mask=Mask(keeps=_floats))
    _is_usable(rank, group)


def _changed_before_the_backward(rank: int, group: dist.ProcessGroup) -> None:
    """On one rank: this rank has torch's error, and the other hears of it, where rows
    are exchanged and where rows are kept as they lie."""
    for wrong_rank, (heads, rows) in product((0, 1), ((5, [12, 12]), (4, [1, 23]))):
        for changed in range(3):
            inputs = [
                torch.randn(1, h, rows[rank], 8, requires_grad=True) * 1.0
                for h in (heads, 1, 1)
            ]
            out = sharded.attention(*inputs, group=group, enable_gqa=True)
            if rank == wrong_rank:
                inputs[changed].add_(1)
            result = None
            try:
                out.sum().backward()
            except (RuntimeError, ValueError) as error:
                result = str(error)
            words = "modified by an inplace operation"
            assert result is None or words in result
    _is_usable(rank, group)


def _inference_tensors(rank: int, group: dist.ProcessGroup) -> None:
    """A bias that autograd cannot watch is an error, as on one device: a change of it
    went unnoticed."""
    with torch.inference_mode():
        bias = torch.zeros(24, 24)
        sinks = torch.zeros(4)
    for mask in (bias, Mask(bias=bias), Mask(sinks=sinks)):
        with pytest.raises(RuntimeError, match="inference mode"):
            _call(group, attn_mask=mask)
        assert _call(group, attn_mask=mask, grad=False).isfinite().all()
    _is_usable(rank, group)


class PlantedError(Exception):
    """What a rank fails with here."""


def _failing(*args: Any) -> Any:
    raise PlantedError("out of everything")


def _one_fails(rank: int) -> None:
    """Heads are exchanged, or shared otherwise; the others wait until the time
    limit."""
    for kv_heads, name, lengths in (
        (4, "forward", "equal"), (4, "backward", None), (1, "forward", None), (1, "backward", None)
    ):  # fmt: skip
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        options = {
            "kv_heads": kv_heads,
            "heads": 4 if kv_heads == 4 else 5,
            "lengths": lengths,
        }
        out = _call(group, **options)
        passes: dict[str, Callable[[], Any]] = {
            "forward": lambda options=options, group=group: _call(group, **options),
            "backward": lambda out=out: out.sum().backward(retain_graph=True),
        }
        compute_stage = ShardedCall.compute_stage
        if rank == 0:
            ShardedCall.compute_stage = _failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError if rank else PlantedError):
            passes[name]()
        ShardedCall.compute_stage = compute_stage  # type: ignore[method-assign]
        # What follows is not taken for what is missing.
        for again in passes.values():
            with pytest.raises(RuntimeError, match="failed on this rank"):
                again()
        del out, passes, again, group
    # Others of the process can be used.
    torch.manual_seed(1)
    compare(rank, [17, 20], inputs_of(4, 2, 37, 8, 8, torch.float32, 1), True)


def _a_graph_does_not_keep_its_group() -> None:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    kept = []
    for heads, kv_heads in ((4, 4), (5, 1)):
        kept += [_call(group, heads, kv_heads=kv_heads) for _ in range(2)]
        kept[-1].sum().backward(retain_graph=True)
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert left() is None, gc.get_referrers(left())
    with pytest.raises(RuntimeError, match="has been destroyed"):
        kept[0].sum().backward()


def _named(factor: float) -> Any:
    def function(*three: torch.Tensor, is_causal: bool, scale: float) -> Any:
        return textbook(*three, is_causal=is_causal, scale=factor * scale)

    return qa.from_lse_function(function, name="over ranks")


def _three(heads: int) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    return [
        torch.randn(1, heads, 24, 8, dtype=torch.double, requires_grad=True)
        for _ in range(3)
    ]


def _a_kernel_by_its_name(rank: int, group: dist.ProcessGroup) -> None:
    """The backward has the forward's, though there is another of that name by then."""
    ranks = partial(sharded.attention, group=group)
    for heads, causal, call in (
        (2, False, ranks),
        (1, True, ranks),
        (2, True, attention),
    ):
        found = []
        for anew in (False, True):
            qa.register_kernel(_named(1.0))
            given = _three(heads)
            out = call(*given, is_causal=causal, kernel="over ranks")
            if anew:
                qa.register_kernel(_named(4.0))
            out.sum().backward()
            found.append([t.grad for t in given])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]


def _kernels_that_are_refused(rank: int, group: dist.ProcessGroup) -> None:
    """Parts of a call have positions of their own, so results were of another
    attention."""
    for kernel in (
        qa.from_score_mod(lambda s, b, h, q, k: s - (q - k).abs(), compiled=False),
        qa.LongNetKernel([(16, 1)]),
        NativeKernel(softcap=5.0),
    ):
        with pytest.raises(NotImplementedError, match="positions in the whole call"):
            sharded.attention(*_three(2), kernel=kernel, group=group)


OWN = functional.scaled_dot_product_attention


def _attended(
    x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def _context_parallel(rank: int, group: dist.ProcessGroup) -> None:
    """Buffers are sharded and put back, results are right."""
    mesh = init_device_mesh("cpu", (2,))
    x, places = torch.randn(2, 19, 16, dtype=torch.float64), torch.arange(19)
    weight = torch.randn(16, 48, dtype=torch.float64, requires_grad=True)
    rows = slice(9, 19) if rank else slice(9)
    for mask in (None, torch.randn(19, 19, dtype=torch.float64)):
        exact = _attended(x, weight, mask)
        (wanted,) = torch.autograd.grad(exact.square().sum(), weight)
        report = sharded.ShardedReport()
        given, own = x.clone(), places.clone()
        with sharded.context_parallel(
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
        assert report.ranks == 2
        assert torch.equal(given, x)
        assert torch.equal(own, places[rows])
        assert functional.scaled_dot_product_attention is OWN
    with pytest.raises(RuntimeError, match="inside"), sharded.context_parallel(mesh):
        raise RuntimeError("inside")
    assert functional.scaled_dot_product_attention is OWN


def _modules_of_torch(rank: int, group: dist.ProcessGroup) -> None:
    """In evaluation torch's fast path would attend to this rank's rows alone, as
    weights would."""
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 24, batch_first=True, dtype=torch.float64
    )
    x = torch.randn(2, 19, 16, dtype=torch.float64)
    rows = slice(9, 19) if rank else slice(9)
    for parameter in layer.parameters():
        dist.broadcast(parameter.detach(), 0, group=group)
    with torch.no_grad():
        wanted = layer.eval()(x)
        with sharded.context_parallel(group, buffers=[x.clone()], buffer_seq_dims=[1]):
            mine = x[:, rows].contiguous()
            assert torch.allclose(layer(mine), wanted[:, rows], atol=1e-10)
            with pytest.raises(NotImplementedError, match="need_weights=False"):
                layer.self_attn(mine, mine, mine)
    assert torch.backends.mha.get_fastpath_enabled()
    assert len(layer.self_attn(x, x, x)) == 2


def _buffers_that_share_memory(rank: int, group: dist.ProcessGroup) -> None:
    """With each other, and with what is no buffer."""
    batch, places = torch.arange(22).view(2, 11).clone(), torch.arange(10)
    buffers = [batch[:, :-1], batch[:, 1:], places[None].expand(2, -1)]
    wanted, rows = [b.clone() for b in buffers], slice(5 * rank, 5 * rank + 5)
    with sharded.context_parallel(
        group,
        buffers=buffers,
        buffer_seq_dims=[1, 1, 1],
        no_restore_buffers=[buffers[1]],
    ):
        assert all(
            torch.equal(b, w[:, rows]) for b, w in zip(buffers, wanted, strict=True)
        )
        assert torch.equal(batch, torch.arange(22).view(2, 11))
    wanted[1] = wanted[1][:, rows]
    assert all(torch.equal(b, w) for b, w in zip(buffers, wanted, strict=True))
    assert torch.equal(batch, torch.arange(22).view(2, 11))
    assert torch.equal(places, torch.arange(10))
    assert buffers[0].data_ptr() == batch.data_ptr()
    with torch.inference_mode():
        refused_by_torch = torch.arange(10)
    with (
        pytest.raises(RuntimeError, match="inference tensor"),
        sharded.context_parallel(
            group, buffers=[places, refused_by_torch], buffer_seq_dims=[0, 0]
        ),
    ):
        pass
    assert torch.equal(places, torch.arange(10)), "it was set before the error"


def _buffers_that_are_refused(group: dist.ProcessGroup) -> None:
    x = torch.zeros(2, 5)
    for named, words in (
        ({"buffers": [x]}, "buffer_seq_dims"),
        ({"buffers": [x], "buffer_seq_dims": [2]}, "buffer_seq_dims"),
        ({"buffers": [x, x], "buffer_seq_dims": [0, 1]}, "twice"),
        (
            {"buffers": [x, torch.zeros(4)], "buffer_seq_dims": [1, 0]},
            "same number of tokens",
        ),
        ({"no_restore_buffers": {x}}, "no_restore_buffers"),
        ({"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [1]}, "gradient"),
        (
            {"buffers": [x.clone().requires_grad_() + 1], "buffer_seq_dims": [1]},
            "gradient",
        ),
    ):
        with (
            pytest.raises(ValueError, match=words),
            sharded.context_parallel(group, **named),
        ):
            pass
    with pytest.raises(TypeError, match="mesh"), sharded.context_parallel(3):  # type: ignore[arg-type]
        pass
