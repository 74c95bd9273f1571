"""Kernels that are wrong in one way each, and the name that is right for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from quorum_attention.checking import causes
from quorum_attention.kernels import InnerKernel, merge_
from quorum_attention.kernels.kit import from_lse_function

Planted = tuple[Callable[[], InnerKernel], str]


def mask_of(rows: int, columns: int, diagonal: int = 1) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(diagonal)


def softmax(scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without a key: 0 and -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - safe.unsqueeze(-1)) @ value, lse


def scores_of(query, key, is_causal, scale):
    scores = scale * (query @ key.mT)
    return scores.masked_fill(mask_of(*scores.shape[-2:]), -torch.inf) if is_causal else scores


def plain(query, key, value, *, is_causal, scale):
    return softmax(scores_of(query, key, is_causal, scale), value)


def gradients(grad_out, query, key, value, out, lse, *, is_causal, scale, **positions):
    """As FlashAttention's: with the whole row's out and lse."""
    scores = scores_of(query, key, is_causal, scale)
    p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    delta = (grad_out * out).sum(-1, keepdim=True)
    ds = p * (grad_out @ value.mT - delta)
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


# Each error as a function of what it changes in a plain call: named, with the cause to be found.

FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {}
BACKWARDS: dict[str, tuple[Callable[..., Any], str]] = {}
KERNELS: dict[str, Planted] = {}


def forwards(cause: str, **wrong: Callable[..., Any]) -> None:
    """Functions of (query, key, value, is_causal, scale)."""
    for name, function in wrong.items():

        def call(query, key, value, *, is_causal, scale, function=function):
            return function(query, key, value, is_causal, scale)

        FUNCTIONS[name] = call, cause


def results(cause: str, **changed: Callable[..., Any]) -> None:
    """Right but for what is made of (out, lse)."""
    for name, change in changed.items():

        def call(query, key, value, *, is_causal, scale, change=change):
            return change(*plain(query, key, value, is_causal=is_causal, scale=scale))

        FUNCTIONS[name] = call, cause


def inputs(cause: str, **changed: Callable[..., Any]) -> None:
    """Right but for the (query, key, value) that are computed with."""
    for name, change in changed.items():

        def call(query, key, value, *, is_causal, scale, change=change):
            return plain(*change(query, key, value), is_causal=is_causal, scale=scale)

        FUNCTIONS[name] = call, cause


def scores(cause: str, **changed: Callable[..., Any]) -> None:
    """Right but for the scores (of scaled products, and whether the call is causal)."""
    for name, change in changed.items():

        def call(query, key, value, *, is_causal, scale, change=change):
            return softmax(change(scale * (query @ key.mT), is_causal), value)

        FUNCTIONS[name] = call, cause


def backwards(cause: str, **changed: Callable[..., Any]) -> None:
    """Right but for what is made of the three gradients."""
    for name, change in changed.items():
        BACKWARDS[name] = (lambda *given, f=change, **named: f(*gradients(*given, **named))), cause


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor + (tensor.to(dtype).to(tensor.dtype) - tensor).detach()


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + 1e-3 * torch.randn_like(tensor))


results(
    causes.LSE,
    no_lse=lambda out, lse: (out, lse * 0),
    lse_in_base_two=lambda out, lse: (out, lse / math.log(2)),
    lse_rounded_to_fp16=lambda out, lse: (out, rounded(lse, torch.float16)),
)
results(
    causes.WEIGHTS,
    output_normalised=lambda out, lse: (functional.normalize(out, dim=-1), lse),
)
results(
    causes.STATE,
    dropout=lambda out, lse: (functional.dropout(out, 0.1), lse),
    noise=lambda out, lse: (noisy(out), lse),
)


def unnormalised(query, key, value, is_causal, scale):
    made = scores_of(query, key, is_causal, scale)
    return torch.exp(made - made.amax(-1, keepdim=True)) @ value, torch.logsumexp(made, -1)


def strides_ignored(query, key, value, is_causal, scale):
    flat = torch.empty(0, dtype=key.dtype).set_(key.untyped_storage())
    read = flat[key.storage_offset() :][: key.numel()]
    if read.numel() == key.numel() and not key.requires_grad:
        key = read.reshape(key.shape)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


def queries_scaled_in_place(query, key, value, is_causal, scale):
    with torch.no_grad():
        query.detach().mul_(1.5)
    return plain(query, key, value, is_causal=is_causal, scale=scale)


def value_dim_taken_for_head_dim(query, key, value, is_causal, scale):
    """As if values were laid out with the queries' width."""
    wide, d = value.shape[-1], query.shape[-1]
    if wide != d:
        flat = value.contiguous().flatten(2)
        value = flat[..., : value.shape[2] * d].unflatten(2, (value.shape[2], d))
        value = functional.pad(value, (0, wide - d)) if wide > d else value[..., :wide]
    return plain(query, key, value, is_causal=is_causal, scale=scale)


def sums_in_fp16(query, key, value, is_causal, scale):
    out, _ = plain(query.half(), key.half(), value.half(), is_causal=is_causal, scale=scale)
    return out.to(query.dtype), plain(query, key, value, is_causal=is_causal, scale=scale)[1]


def causal_ignored(query, key, value, is_causal, scale):
    return plain(query, key, value, is_causal=False, scale=scale)


def scaled(by: Callable[[torch.Tensor, torch.Tensor, float], float]) -> Callable[..., Any]:
    return lambda q, k, v, is_causal, scale: plain(
        q, k, v, is_causal=is_causal, scale=by(q, k, scale)
    )


forwards(
    causes.LSE,
    lse_without_the_causal_mask=lambda q, k, v, is_causal, scale: (
        plain(q, k, v, is_causal=is_causal, scale=scale)[0], causal_ignored(q, k, v, 0, scale)[1]
    ),
)  # fmt: skip
forwards(
    causes.WEIGHTS,
    unnormalised=unnormalised,
)
forwards(causes.PAIRS, causal_ignored=causal_ignored)
forwards(
    causes.SIZES,
    no_scale=scaled(lambda q, k, scale: 1.0),
    value_dim_taken_for_head_dim=value_dim_taken_for_head_dim,
    strides_ignored=strides_ignored,
)
forwards(
    causes.POSITIONS,
    log_length_scale=scaled(lambda q, k, scale: scale * math.log(k.shape[2] + 1)),
)
forwards(causes.STATE, queries_scaled_in_place=queries_scaled_in_place)
forwards(causes.PRECISION, sums_in_fp16=sums_in_fp16)


def causal_at(diagonal: int) -> Callable[..., torch.Tensor]:
    return lambda made, is_causal: (
        made.masked_fill(mask_of(*made.shape[-2:], diagonal), -torch.inf) if is_causal else made
    )


def last_key_dropped(made: torch.Tensor, is_causal: bool) -> torch.Tensor:
    made, n = causal_at(1)(made, is_causal), made.shape[-1]
    last = torch.arange(n) == n - 1
    return made.masked_fill(last, -torch.inf) if not is_causal and n > 1 else made


def biased(made, rows, columns, is_causal, slope=0.05):
    apart = rows[:, None] - columns[None]
    made = made - slope * apart.abs().to(made.dtype)
    return made.masked_fill(apart < 0, -torch.inf) if is_causal else made


scores(
    causes.PAIRS,
    last_key_dropped=last_key_dropped,
    causal_one_too_many=causal_at(2),
)
scores(
    causes.POSITIONS,
    local_alibi=lambda made, is_causal: biased(
        made, torch.arange(made.shape[-2]), torch.arange(made.shape[-1]), is_causal
    ),
)
scores(  # talking heads
    causes.HEADS,
    heads_mixed=lambda made, is_causal: causal_at(1)(made, is_causal) + made.mean(1, keepdim=True),
)
inputs(
    causes.HEADS,
    temperature_by_local_entry=lambda q, k, v: (
        q * (1 + torch.arange(q.shape[0], dtype=q.dtype))[:, None, None, None], k, v
    ),
)  # fmt: skip


def near(query, key, is_causal, scale, rows, columns, fill):
    """Scores within a window, which is right but for rows that it leaves no key; what it keeps."""
    apart = rows[:, None] - columns[None]
    keep = (apart.abs() < 9) & (apart >= 0) if is_causal else apart.abs() < 9
    return (scale * (query @ key.mT)).masked_fill(~keep, fill), keep


def nan_in_rows_without_a_key(query, key, value, *, is_causal, scale, query_positions,
                              key_positions):  # fmt: skip
    at = query_positions, key_positions
    made, _ = near(query, key, is_causal, scale, *at, -torch.inf)
    p = torch.softmax(made, -1)
    return p @ value, p.sum(-1) * torch.logsumexp(made, -1)


def local_slopes(query, key, value, *, is_causal, scale, query_positions, key_positions):
    slopes = 0.5 ** (torch.arange(query.shape[1], dtype=query.dtype) + 1)
    at = query_positions, key_positions
    made = biased(scale * (query @ key.mT), *at, is_causal, slopes[:, None, None])
    return softmax(made, value)


FUNCTIONS |= {
    "nan_in_rows_without_a_key": (nan_in_rows_without_a_key, causes.NO_KEYS),
    "local_slopes": (local_slopes, causes.HEADS),
}


def rotated(tensor, at):
    half = tensor.shape[-1] // 2
    turns = at[:, None] * 0.3 ** torch.arange(half, dtype=torch.float64)
    cos, sin = turns.cos().to(tensor.dtype), turns.sin().to(tensor.dtype)
    low, high = tensor[..., :half], tensor[..., half : 2 * half]
    rest = tensor[..., 2 * half :]
    return torch.cat([low * cos - high * sin, low * sin + high * cos, rest], -1)


def remembering() -> InnerKernel:
    """The result of the first call of a shape, for ever."""
    kept: dict[Any, Any] = {}

    def stale(query, key, value, *, is_causal, scale):
        out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
        at = (query.shape, key.shape, is_causal, query.dtype)
        before = kept.setdefault(at, (out.detach(), lse.detach()))
        return out * 0 + before[0], lse * 0 + before[1]

    return from_lse_function(stale)


KERNELS |= {
    "remembering": (remembering, causes.STATE),
}

# Backwards.

backwards(
    causes.BACKWARD,
    halved=lambda dq, dk, dv: (dq / 2, dk / 2, dv / 2),
)
backwards(causes.STATE, noisy_gradient=lambda *grads: tuple(map(noisy, grads)))
backwards(  # right where it holds all heads, or entries, at a time
    causes.HEADS,
    keys_gradient_by_local_head=lambda dq, dk, dv: (dq, dk * (1 + (dk.shape[1] == 1)), dv),
)


def own(given, is_causal, scale):
    """What these keys alone give."""
    return plain(*given[1:4], is_causal=is_causal, scale=scale)


for _name, _change in {
    "scale_forgotten": lambda given, is_causal, scale: (given, is_causal, 1.0),
    "no_causal_mask_in_the_backward": lambda given, is_causal, scale: (given, False, scale),
    "local_delta": lambda given, is_causal, scale: (
        (*given[:4], own(given, is_causal, scale)[0], given[5]), is_causal, scale
    ),
}.items():  # fmt: skip

    def _backward(*given, is_causal, scale, change=_change):
        given, is_causal, scale = change(given, is_causal, scale)
        return gradients(*given, is_causal=is_causal, scale=scale)

    BACKWARDS[_name] = _backward, causes.BACKWARD


class Grouped:
    """A function that takes fewer key heads as they are, and maps them wrongly."""

    @staticmethod
    def interleaved(query, key, value, *, is_causal, scale):
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat(1, shared, 1, 1) for t in (key, value))
        return plain(query, key, value, is_causal=is_causal, scale=scale)

    @staticmethod
    def right(query, key, value, *, is_causal, scale):
        shared = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
        return plain(query, key, value, is_causal=is_causal, scale=scale)

    @staticmethod
    def gradients(reduce):
        def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
            shared = query.shape[1] // key.shape[1]
            many = [t.repeat_interleave(shared, dim=1) for t in (key, value)]
            dq, dk, dv = gradients(
                grad_out, query, many[0], many[1], out, lse, is_causal=is_causal, scale=scale
            )
            return dq, *(reduce(g, key.shape[1], shared) for g in (dk, dv))

        return backward


def summed(g, heads, shared):
    return g.unflatten(1, (heads, shared)).sum(2)


def grouped(backward: Callable[..., Any]) -> Callable[[], InnerKernel]:
    return lambda: from_lse_function(
        Grouped.right, backward=Grouped.gradients(backward), grouped=True
    )


KERNELS |= {
    "grouped heads interleaved": (
        lambda: from_lse_function(Grouped.interleaved, grouped=True), causes.HEADS
    ),
    "gradients of a group: over_the_wrong_axis": (
        grouped(lambda g, heads, shared: g.unflatten(1, (shared, heads)).sum(1)), causes.HEADS
    ),
}  # fmt: skip


class WholeTask(InnerKernel):
    """A full inner kernel that makes its own mask of a task."""

    name = "whole-task"
    own_attention = True

    def __init__(self, mask=None) -> None:
        self.mask = mask or cqs

    def refusal(self, call):
        return "grouped heads" if call.query_heads != call.key_heads else None

    def forward_workspace_bytes(self, call, extent):
        return 1 << 20

    backward_workspace_bytes = forward_workspace_bytes

    def scores(self, task):
        scores = task.scale * (task.query @ task.key.mT)
        return scores.masked_fill(~self.mask(task), -torch.inf)

    def forward(self, task, state):
        merge_(state.out, state.lse, *softmax(self.scores(task), task.value))

    def backward(self, task, grads):
        lse = grads.lse.masked_fill(grads.lse == -torch.inf, 0.0)
        p = torch.exp(self.scores(task) - lse.unsqueeze(-1)).to(task.query.dtype)
        delta = (grads.grad_out * grads.out).sum(-1, keepdim=True)
        ds = p * (grads.grad_out @ task.value.mT - delta)
        grads.grad_query += task.scale * (ds @ task.key)
        grads.grad_key += task.scale * (ds.mT @ task.query)
        grads.grad_value += p.mT @ grads.grad_out


def _sized(task, keep):
    return keep[: task.query.shape[2], : task.key.shape[2]]


def cqs(task):
    keep = torch.from_numpy(task.task.mask())
    return _sized(task, keep.tril() if task.is_causal else keep)


def with_every_diagonal(task):
    lengths = torch.tensor([s.stop - s.start for s in task.task.spans])
    chunk = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    keep = torch.from_numpy(task.task.mask()) | (chunk[:, None] == chunk[None])
    return _sized(task, keep.tril() if task.is_causal else keep)


def window_within_the_task(task):
    rows, columns = torch.arange(task.query.shape[2]), torch.arange(task.key.shape[2])
    return cqs(task) & ((rows[:, None] - columns[None]).abs() < 30)


for _mask, _cause in (
    (with_every_diagonal, causes.PAIRS),
    (window_within_the_task, causes.POSITIONS),
):
    KERNELS[f"whole task: {_mask.__name__}"] = (lambda mask=_mask: WholeTask(mask), _cause)


class Overwriting(WholeTask):
    """Adds to nothing: what was merged before is lost."""

    def forward(self, task, state):
        out, lse = softmax(self.scores(task), task.value)
        state.out.copy_(out)
        state.lse.copy_(lse)


class ReusingItsBuffer(WholeTask):
    """A monolithic call returns memory that the next one writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, Any] = {}

    def takes_whole(self, query_heads, key_heads, tokens, masked, every):
        return True

    def whole_forward(self, call):
        query, key, value = call.inputs
        out, lse = plain(query, key, value, is_causal=call.causal, scale=call.scale)
        at = (query.shape, value.shape, key.shape, query.dtype)
        kept = self.buffers.setdefault(at, (torch.empty_like(out), torch.empty_like(lse)))
        kept[0].copy_(out)
        kept[1].copy_(lse)
        return kept

    def whole_backward(self, call, saved):
        return gradients(
            saved.grad_out, *call.inputs, saved.out, saved.lse, is_causal=call.causal,
            scale=call.scale,
        )  # fmt: skip


KERNELS["returns one buffer again and again"] = ReusingItsBuffer, causes.STATE
KERNELS["state overwritten"] = Overwriting, causes.PAIRS


class WritingKeys(WholeTask):
    """After it has used them."""

    def forward(self, task, state):
        super().forward(task, state)
        task.key.mul_(1.01)


class OverwritingGradients(WholeTask):
    """Those of other tasks are lost."""

    def backward(self, task, grads):
        for tensor in (grads.grad_query, grads.grad_key, grads.grad_value):
            tensor.zero_()
        super().backward(task, grads)


class NanInTheBackward(WholeTask):
    """Of rows that keep no key of a task."""

    def backward(self, task, grads):
        super().backward(task, grads)
        none = (self.scores(task) == -torch.inf).all(-1, keepdim=True)
        grads.grad_query.masked_fill_(none, math.nan)


class HeadsOfTheGroup(WholeTask):
    """TaskTensors.first_head is not asked."""

    def scores(self, task):
        scores = super().scores(task)
        return scores - 0.2 * torch.arange(scores.shape[1])[:, None, None] * torch.arange(
            scores.shape[-1]
        )


KERNELS |= {
    "keys written": (WritingKeys, causes.STATE),
    "gradients overwritten": (OverwritingGradients, causes.BACKWARD),
    "NaN in the backward": (NanInTheBackward, causes.NO_KEYS),
    "slopes of the group, positions within the task": (HeadsOfTheGroup, causes.HEADS),
}


def planted() -> dict[str, Planted]:
    """Every wrong kernel by name."""
    found: dict[str, Planted] = {}
    for name, (function, cause) in FUNCTIONS.items():
        found[name] = (lambda f=function: from_lse_function(f)), cause
    for name, (backward, cause) in BACKWARDS.items():
        found[f"backward: {name}"] = (
            (lambda b=backward: from_lse_function(plain, backward=b)), cause,
        )  # fmt: skip
    return found | KERNELS
