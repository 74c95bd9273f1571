"""Kernels that are wrong in one way each, with the cause to be named; and right ones of every
sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import quorum_attention as qa
from quorum_attention.checking import causes
from quorum_attention.kernels import InnerKernel, merge_
from quorum_attention.kernels.kit import (
    document,
    from_lse_function,
    from_score_mod,
    sliding_window,
)

# Functions and backwards that are wrong, and whole kernels; each with the cause to be found.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {}
BACKWARDS: dict[str, tuple[Callable[..., Any], str]] = {}
KERNELS: dict[str, tuple[Callable[[], InnerKernel], str]] = {}


def softmax(scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without a key: 0 and -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - safe.unsqueeze(-1)) @ value, lse


def masked(scores: torch.Tensor, is_causal: bool, diagonal: int = 1) -> torch.Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(later, -torch.inf) if is_causal else scores


def plain(query, key, value, *, is_causal, scale):
    return softmax(masked(scale * (query @ key.mT), is_causal), value)


def gradients(grad_out, query, key, value, out, lse, *, is_causal, scale):
    """As FlashAttention's: with the whole row's out and lse."""
    scores = masked(scale * (query @ key.mT), is_causal)
    p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    ds = p * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


# Functions.


def functions(cause: str, **wrong: Callable[..., Any]) -> None:
    """Functions of (query, key, value, is_causal, scale)."""
    for name, function in wrong.items():

        def call(query, key, value, *, is_causal, scale, function=function):
            return function(query, key, value, is_causal, scale)

        FUNCTIONS[name] = call, cause


def results(change: Callable[..., Any]) -> Callable[..., Any]:
    """Right but for what is made of (out, lse)."""
    return lambda q, k, v, causal, scale: change(*plain(q, k, v, is_causal=causal, scale=scale))


def scores(change: Callable[..., Any]) -> Callable[..., Any]:
    """Right but for what is made of the scaled products."""
    return lambda q, k, v, causal, scale: softmax(change(scale * (q @ k.mT), causal), v)


def inputs(change: Callable[..., Any]) -> Callable[..., Any]:
    """Right but for the query, key, value and scale that are computed with."""

    def function(query, key, value, is_causal, scale):
        *three, scale = change(query, key, value, scale)
        return plain(*three, is_causal=is_causal, scale=scale)

    return function


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + 1e-3 * torch.randn_like(tensor))


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor + (tensor.to(dtype).to(tensor.dtype) - tensor).detach()


def strides_ignored(query, key, value, scale):
    flat = torch.empty(0, dtype=key.dtype).set_(key.untyped_storage())
    read = flat[key.storage_offset() :][: key.numel()]
    if read.numel() == key.numel() and not key.requires_grad:
        key = read.reshape(key.shape)
    return query, key, value, scale


def written_in_place(query, key, value, scale):
    with torch.no_grad():
        query.detach().mul_(1.5)
    return query, key, value, scale


def value_dim_taken_for_head_dim(query, key, value, scale):
    """As if values were laid out with the queries' width."""
    wide, d = value.shape[-1], query.shape[-1]
    if wide != d:
        flat = value.contiguous().flatten(2)
        value = flat[..., : value.shape[2] * d].unflatten(2, (value.shape[2], d))
        value = functional.pad(value, (0, wide - d)) if wide > d else value[..., :wide]
    return query, key, value, scale


def sums_in_fp16(query, key, value, is_causal, scale):
    exact = plain(query, key, value, is_causal=is_causal, scale=scale)
    narrow = plain(query.half(), key.half(), value.half(), is_causal=is_causal, scale=scale)
    return narrow[0].to(query.dtype), exact[1]


def last_key_dropped(made: torch.Tensor, is_causal: bool) -> torch.Tensor:
    n = made.shape[-1]
    if is_causal or n == 1:
        return masked(made, is_causal)
    return made.masked_fill(torch.arange(n) == n - 1, -torch.inf)


def alibi(made, rows, columns, is_causal, slope=0.05):
    apart = rows[:, None] - columns[None]
    made = made - slope * apart.abs().to(made.dtype)
    return made.masked_fill(apart < 0, -torch.inf) if is_causal else made


functions(
    causes.LSE,
    no_lse=results(lambda out, lse: (out, lse * 0)),
    lse_in_base_two=results(lambda out, lse: (out, lse / math.log(2))),
    lse_rounded_to_fp16=results(lambda out, lse: (out, rounded(lse, torch.float16))),
)
functions(
    causes.WEIGHTS,
    output_normalised=results(lambda out, lse: (functional.normalize(out, dim=-1), lse)),
)
functions(
    causes.STATE,
    dropout=results(lambda out, lse: (functional.dropout(out, 0.1), lse)),
    noise=results(lambda out, lse: (noisy(out), lse)),
    queries_scaled_in_place=inputs(written_in_place),
)
functions(
    causes.PAIRS,
    causal_ignored=scores(lambda made, causal: made),
    causal_one_too_many=scores(lambda made, causal: masked(made, causal, 2)),
    last_key_dropped=scores(last_key_dropped),
)
functions(
    causes.SIZES,
    no_scale=inputs(lambda q, k, v, scale: (q, k, v, 1.0)),
    strides_ignored=inputs(strides_ignored),
    value_dim_taken_for_head_dim=inputs(value_dim_taken_for_head_dim),
)
functions(
    causes.POSITIONS,
    local_alibi=scores(
        lambda made, causal: alibi(made, *map(torch.arange, made.shape[-2:]), causal)
    ),
)
functions(
    causes.HEADS,
    talking_heads=scores(lambda made, causal: masked(made, causal) + made.mean(1, keepdim=True)),
)
functions(causes.PRECISION, sums_in_fp16=sums_in_fp16)


def window(query, key, value, *, is_causal, scale, query_positions, key_positions):
    """Right: rows that keep no key of a rectangle are 0 and -inf."""
    apart = query_positions[:, None] - key_positions[None]
    keep = apart.abs() < 9
    keep = keep & (apart >= 0) if is_causal else keep
    none = ~keep.any(-1)
    made = (scale * (query @ key.mT)).masked_fill(~keep, -torch.inf)
    out, lse = softmax(made.masked_fill(none[:, None], 0.0), value)
    return out, lse.masked_fill(none, -torch.inf)


def nan_in_rows_without_a_key(query, key, value, *, is_causal, scale, query_positions,
                              key_positions):  # fmt: skip
    at = {"query_positions": query_positions, "key_positions": key_positions}
    out, lse = window(query, key, value, is_causal=is_causal, scale=scale, **at)
    none = lse == -torch.inf
    return out.masked_fill(none.unsqueeze(-1), math.nan), lse.masked_fill(none, math.nan)


def local_slopes(query, key, value, *, is_causal, scale, query_positions, key_positions):
    slopes = 0.5 ** (torch.arange(query.shape[1], dtype=query.dtype) + 1)
    at = query_positions, key_positions
    return softmax(alibi(scale * (query @ key.mT), *at, is_causal, slopes[:, None, None]), value)


FUNCTIONS |= {
    "nan_in_rows_without_a_key": (nan_in_rows_without_a_key, causes.NO_KEYS),
    "local_slopes": (local_slopes, causes.HEADS),
}


def remembering() -> InnerKernel:
    """The result of the first call of a shape, for ever."""
    kept: dict[Any, Any] = {}

    def stale(query, key, value, *, is_causal, scale):
        out, lse = plain(query, key, value, is_causal=is_causal, scale=scale)
        at = (query.shape, key.shape, is_causal, query.dtype)
        before = kept.setdefault(at, (out.detach(), lse.detach()))
        return out * 0 + before[0], lse * 0 + before[1]

    return from_lse_function(stale)


# Backwards.


def backwards(cause: str, given: Any = None, made: Any = None) -> tuple[Callable[..., Any], str]:
    """Right but for what is done to what it is given, or to the gradients it made."""

    def backward(*tensors, is_causal, scale):
        if given is not None:
            tensors, is_causal, scale = given(tensors, is_causal, scale)
        grads = gradients(*tensors, is_causal=is_causal, scale=scale)
        return grads if made is None else made(*grads)

    return backward, cause


def local_delta(tensors, is_causal, scale):
    """The output of these keys alone."""
    own = plain(*tensors[1:4], is_causal=is_causal, scale=scale)[0]
    return (*tensors[:4], own, tensors[5]), is_causal, scale


BACKWARDS |= {
    "halved": backwards(causes.BACKWARD, made=lambda *grads: tuple(g / 2 for g in grads)),
    "no_causal_mask": backwards(causes.BACKWARD, lambda t, causal, scale: (t, False, scale)),
    "local_delta": backwards(causes.BACKWARD, local_delta),
    "noisy": backwards(causes.STATE, made=lambda *grads: tuple(map(noisy, grads))),
    # Right where it holds all heads at a time.
    "keys_by_local_head": backwards(
        causes.HEADS, made=lambda dq, dk, dv: (dq, dk * (1 + (dk.shape[1] == 1)), dv)
    ),
}


# Fewer key heads, as they are.


def grouped(repeat: Callable[..., Any], reduce: Callable[..., Any] | None = None) -> InnerKernel:
    """A function that repeats key heads in one way, and sums their gradients in another."""

    def forward(query, key, value, *, is_causal, scale):
        shared = query.shape[1] // key.shape[1]
        return plain(query, repeat(key, shared), repeat(value, shared), is_causal=is_causal,
                     scale=scale)  # fmt: skip

    def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
        heads, shared = key.shape[1], query.shape[1] // key.shape[1]
        call = {"is_causal": is_causal, "scale": scale}
        many = repeat(key, shared), repeat(value, shared)
        dq, *rest = gradients(grad_out, query, *many, out, lse, **call)
        return dq, *(reduce(g, heads, shared) for g in rest)

    return from_lse_function(forward, backward=backward if reduce else None, grouped=True)


def in_turn(t: torch.Tensor, shared: int) -> torch.Tensor:
    return t.repeat_interleave(shared, dim=1)


# Full inner kernels.


def cqs(task):
    keep = torch.from_numpy(task.task.mask())
    keep = keep.tril() if task.is_causal else keep
    return keep[: task.query.shape[2], : task.key.shape[2]]


def with_every_diagonal(task):
    lengths = torch.tensor([s.stop - s.start for s in task.task.spans])
    chunk = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    same = (chunk[:, None] == chunk[None])[: task.query.shape[2], : task.key.shape[2]]
    return cqs(task) | (same.tril() if task.is_causal else same)


class WholeTask(InnerKernel):
    """Makes its own mask of a task; as the operators of a GPU, if of 16 bits alone: sums in fp32,
    everything else in 16 bits."""

    name = "whole-task"
    own_attention = True

    def __init__(self, mask=cqs, dtype=None) -> None:
        self.mask, self.dtype = mask, dtype

    def refusal(self, call):
        if self.dtype not in (None, call.dtype):
            return "16 bits only"
        return "grouped heads" if call.query_heads != call.key_heads else None

    def forward_workspace_bytes(self, call, extent):
        return 1 << 20

    backward_workspace_bytes = forward_workspace_bytes

    def wide(self, tensor):
        return tensor if self.dtype is None else tensor.float()

    def round(self, tensor):
        return tensor if self.dtype is None else tensor.to(self.dtype).float()

    def scores(self, task):
        scores = task.scale * (self.wide(task.query) @ self.wide(task.key).mT)
        return scores.masked_fill(~self.mask(task), -torch.inf)

    def weights(self, scores, lse):
        return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))

    def forward(self, task, state):
        scores = self.scores(task)
        lse = torch.logsumexp(scores, dim=-1)
        p = self.round(self.weights(scores, lse))
        merge_(state.out, state.lse, self.round(p @ self.wide(task.value)), lse)

    def backward(self, task, grads):
        p = self.weights(self.scores(task), grads.lse).to(self.wide(task.query).dtype)
        grad_out, out = self.wide(grads.grad_out), self.wide(grads.out)
        ds = p * (grad_out @ self.wide(task.value).mT - (grad_out * out).sum(-1, keepdim=True))
        ds, p = self.round(ds), self.round(p)
        grads.grad_query += self.round(task.scale * (ds @ self.wide(task.key)))
        grads.grad_key += self.round(task.scale * (ds.mT @ self.wide(task.query)))
        grads.grad_value += self.round(p.mT @ grad_out)


class Overwriting(WholeTask):
    """Merges into nothing: what was merged before is lost."""

    def forward(self, task, state):
        state.out.zero_()
        state.lse.fill_(-torch.inf)
        super().forward(task, state)


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


KERNELS |= {
    "remembering": (remembering, causes.STATE),
    "grouped heads interleaved": (
        lambda: grouped(lambda t, shared: t.repeat(1, shared, 1, 1)), causes.HEADS,
    ),
    "group summed over the wrong axis": (
        lambda: grouped(in_turn, lambda g, heads, shared: g.unflatten(1, (shared, heads)).sum(1)),
        causes.HEADS,
    ),
    "a task with every diagonal": (lambda: WholeTask(with_every_diagonal), causes.PAIRS),
    "state overwritten": (Overwriting, causes.PAIRS),
    "gradients overwritten": (OverwritingGradients, causes.BACKWARD),
    "NaN in the backward": (NanInTheBackward, causes.NO_KEYS),
}  # fmt: skip


def planted() -> dict[str, tuple[Callable[[], InnerKernel], str]]:
    """Every wrong kernel by name."""
    found: dict[str, Any] = {}
    for name, (function, cause) in FUNCTIONS.items():
        found[name] = (lambda f=function: from_lse_function(f)), cause
    for name, (backward, cause) in BACKWARDS.items():
        make = lambda b=backward: from_lse_function(plain, backward=b)  # noqa: E731
        found[f"backward: {name}"] = make, cause
    return found | KERNELS


# Right ones: none may be called wrong.


RIGHT: dict[str, Callable[[], str | InnerKernel]] = {
    "dense": lambda: "dense",
    "cpu": lambda: "cpu",
    "plain": lambda: from_lse_function(plain),
    "grouped, backward given": lambda: grouped(
        in_turn, lambda g, heads, shared: g.unflatten(1, (heads, shared)).sum(2)
    ),
    "whole task": WholeTask,
    "longnet": lambda: qa.LongNetKernel([(32, 1), (64, 2), (128, 4)]),
    "mod: slopes": lambda: from_score_mod(
        lambda s, b, h, q, k: s - (0.1 / (1 + h)) * (q - k).abs(), compiled=False
    ),
    "mod: soft cap, window, documents": lambda: from_score_mod(
        lambda s, b, h, q, k: 50 * torch.tanh(s / 50),
        sliding_window(40) & document(torch.arange(202) // 15),
        compiled=False,
    ),
    "window": lambda: from_lse_function(window),
}
SIXTEEN_BITS = ("dense", "cpu", "plain", "longnet", "mod: slopes", "window")
