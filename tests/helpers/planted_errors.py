"""Kernels that are wrong in one way each, and right ones of every sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import quorum_attention as qa
from helpers.attention import attention as plain
from helpers.attention import gradients, masked, softmax
from quorum_attention.kernels import Gradients, InnerKernel, Statistics, empty_, merge_
from quorum_attention.kernels.kit import (
    document,
    from_lse_function,
    from_score_mod,
    sliding_window,
)

# Functions, right but for one thing.


def of_results(change):
    """Changed is what is made of (out, lse)."""
    return lambda query, key, value, *, is_causal, scale: change(
        *plain(query, key, value, is_causal=is_causal, scale=scale)
    )


def of_scores(change):
    """Changed is what is made of the scaled products."""
    return lambda query, key, value, *, is_causal, scale: softmax(
        change(scale * (query @ key.mT), is_causal), value
    )


def of_inputs(change):
    """Changed are query, key, value and scale before they are computed with."""

    def function(query, key, value, *, is_causal, scale):
        *three, scale = change(query, key, value, scale)
        return plain(*three, is_causal=is_causal, scale=scale)

    return function


def of_gradients(change, before=lambda *given: given):
    """Changed are the gradients, or what they are computed of."""

    def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
        given = before(grad_out, query, key, value, out, lse)
        return change(*gradients(*given, is_causal=is_causal, scale=scale))

    return backward


def noisy(tensor):
    return tensor * (1 + 1e-3 * torch.randn_like(tensor))


def in_fp16(tensor):
    return tensor + (tensor.half().to(tensor.dtype) - tensor).detach()


def sums_in_fp16(query, key, value, *, is_causal, scale):
    call = {"is_causal": is_causal, "scale": scale}
    out, _ = plain(*(t.half() for t in (query, key, value)), **call)
    return out.to(query.dtype), plain(query, key, value, **call)[1]


def alibi(scores, rows, columns, is_causal, slope=0.05):
    apart = rows[:, None] - columns[None]
    scores = scores - slope * apart.abs().to(scores.dtype)
    return scores.masked_fill(apart < 0, -torch.inf) if is_causal else scores


def window(query, key, value, *, is_causal, scale, query_positions, key_positions):
    """Right: rows that keep no key of a rectangle are 0 and -inf."""
    apart = query_positions[:, None] - key_positions[None]
    keep = apart.abs() < 9
    keep = keep & (apart >= 0) if is_causal else keep
    return softmax((scale * (query @ key.mT)).masked_fill(~keep, -torch.inf), value)


def nan_in_rows_without_a_key(query, key, value, *, is_causal, scale, query_positions,
                              key_positions):  # fmt: skip
    at = {"query_positions": query_positions, "key_positions": key_positions}
    out, lse = window(query, key, value, is_causal=is_causal, scale=scale, **at)
    none = lse == -torch.inf
    return out.masked_fill(none.unsqueeze(-1), math.nan), lse.masked_fill(
        none, math.nan
    )


def local_slopes(
    query, key, value, *, is_causal, scale, query_positions, key_positions
):
    slopes = 0.5 ** (torch.arange(query.shape[1], dtype=query.dtype) + 1)
    at = query_positions, key_positions
    return softmax(
        alibi(scale * (query @ key.mT), *at, is_causal, slopes[:, None, None]), value
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "no_lse": of_results(lambda out, lse: (out, lse * 0)),
    "lse_in_base_two": of_results(lambda out, lse: (out, lse / math.log(2))),
    "lse_rounded_to_fp16": of_results(lambda out, lse: (out, in_fp16(lse))),
    "output_normalised": of_results(
        lambda out, lse: (functional.normalize(out, dim=-1), lse)
    ),
    "noise": of_results(lambda out, lse: (noisy(out), lse)),
    "causal_one_too_many": of_scores(lambda s, causal: masked(s, causal, 2)),
    "no_scale": of_inputs(lambda q, k, v, scale: (q, k, v, 1.0)),
    "local_alibi": of_scores(
        lambda s, causal: alibi(s, *map(torch.arange, s.shape[-2:]), causal),
    ),
    "talking_heads": of_scores(
        lambda s, causal: masked(s, causal) + s.mean(1, keepdim=True)
    ),
    "local_slopes": local_slopes,
    "sums_in_fp16": sums_in_fp16,
    "nan_in_rows_without_a_key": nan_in_rows_without_a_key,
}
# Gradients, changed.
BACKWARDS: dict[str, Callable[..., Any]] = {
    "halved": lambda *grads: tuple(g / 2 for g in grads),
    "noisy": lambda *grads: tuple(map(noisy, grads)),
    # Right where it holds all heads at a time.
    "keys_by_local_head": lambda dq, dk, dv: (dq, dk * (1 + (dk.shape[1] == 1)), dv),
}


def grouped(reduce: Callable[..., Any]) -> InnerKernel:
    """Fewer key heads, as they are; their gradients are summed over groups in some
    way."""

    def many(query, key, value):
        shared = query.shape[1] // key.shape[1]
        return query, *(t.repeat_interleave(shared, dim=1) for t in (key, value))

    def forward(query, key, value, *, is_causal, scale):
        return plain(*many(query, key, value), is_causal=is_causal, scale=scale)

    def backward(grad_out, query, key, value, out, lse, *, is_causal, scale):
        heads, shared = key.shape[1], query.shape[1] // key.shape[1]
        call = {"is_causal": is_causal, "scale": scale}
        dq, *rest = gradients(grad_out, *many(query, key, value), out, lse, **call)
        return dq, *(reduce(g, heads, shared) for g in rest)

    return from_lse_function(forward, backward=backward, grouped=True)


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
    """Makes its own mask of a task; as the operators of a GPU, if of 16 bits alone:
    sums in fp32, everything else in 16 bits. ``before``, ``after``: what is done to a
    state or to gradients around a task."""

    name = "whole-task"
    own_attention = True

    def __init__(self, mask=cqs, dtype=None, *, before=None, after=None) -> None:
        self.mask, self.dtype, self.before, self.after = mask, dtype, before, after

    def refusal(self, call):
        if self.dtype not in (None, call.dtype):
            return "16 bits only"
        return "grouped heads" if call.heads != call.kv_heads else None

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
        if self.before is not None:
            self.before(state)
        scores = self.scores(task)
        lse = torch.logsumexp(scores, dim=-1)
        p = self.round(self.weights(scores, lse))
        merge_(state.out, state.lse, self.round(p @ self.wide(task.value)), lse)

    def backward(self, task, grads):
        if self.before is not None:
            self.before(grads)
        p = self.weights(self.scores(task), grads.lse).to(self.wide(task.query).dtype)
        grad_out, out = self.wide(grads.grad_out), self.wide(grads.out)
        ds = p * (
            grad_out @ self.wide(task.value).mT - (grad_out * out).sum(-1, keepdim=True)
        )
        ds, p = self.round(ds), self.round(p)
        grads.grad_query += self.round(task.scale * (ds @ self.wide(task.key)))
        grads.grad_key += self.round(task.scale * (ds.mT @ self.wide(task.query)))
        grads.grad_value += self.round(p.mT @ grad_out)
        if self.after is not None:
            self.after(grads, (self.scores(task) == -torch.inf).all(-1, keepdim=True))


class ReadsAsIfContiguous(WholeTask):
    """Takes a whole call by pointers: right where a key's rows lie one after the
    other."""

    def takes_whole(self, call, tokens, every):
        return True

    def whole_forward(self, call):
        key = call.key
        strides = key.new_empty(key.shape).stride()
        return super().whole_forward(
            replace(call, key=key.as_strided(key.shape, strides))
        )


class ReusesItsBuffer(WholeTask):
    """Takes whole calls, and returns the same memory for each of one dtype."""

    buffer = None

    def takes_whole(self, call, tokens, every):
        return True

    def whole_forward(self, call):
        out, lse = super().whole_forward(call)
        if out.dtype != torch.float16:
            return out, lse
        if self.buffer is None or self.buffer.shape != out.shape:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out), lse


def forget_state(state):
    """What was merged before is lost."""
    if isinstance(state, Statistics):
        empty_(state.out, state.lse)


def forget_gradients(state):
    """Those of other tasks are lost."""
    if isinstance(state, Gradients):
        for tensor in (state.grad_query, state.grad_key, state.grad_value):
            tensor.zero_()


def nan_without_keys(grads, none):
    """Of rows that keep no key of a task."""
    grads.grad_query.masked_fill_(none, math.nan)


KERNELS: dict[str, Callable[[], InnerKernel]] = {
    "group summed over the wrong axis": lambda: grouped(
        lambda g, heads, shared: g.unflatten(1, (shared, heads)).sum(1)
    ),
    "a task with every diagonal": lambda: WholeTask(with_every_diagonal),
    "state overwritten": lambda: WholeTask(before=forget_state),
    "gradients overwritten": lambda: WholeTask(before=forget_gradients),
    "reads as if contiguous": ReadsAsIfContiguous,
    "NaN in the backward": lambda: WholeTask(after=nan_without_keys),
}


def planted() -> dict[str, Callable[[], InnerKernel]]:
    """Every wrong kernel by name."""
    kernels: dict[str, Callable[[], InnerKernel]] = {
        name: partial(from_lse_function, function)
        for name, function in FUNCTIONS.items()
    }
    for name, change in BACKWARDS.items():
        backward = of_gradients(change)
        kernels[f"backward: {name}"] = partial(
            from_lse_function, plain, backward=backward
        )
    return kernels | KERNELS


# Right ones: none may be called wrong.
RIGHT: dict[str, Callable[[], str | InnerKernel]] = {
    "dense": lambda: "dense",
    "cpu": lambda: "cpu",
    "plain": lambda: from_lse_function(plain),
    "grouped, backward given": lambda: grouped(
        lambda g, heads, shared: g.unflatten(1, (heads, shared)).sum(2)
    ),
    "whole task": WholeTask,
    "longnet": lambda: qa.LongNetKernel([(32, 1), (64, 2), (128, 4)]),
    "mod: soft cap, slopes, window, documents": lambda: from_score_mod(
        lambda s, b, h, q, k: 50 * torch.tanh(s / 50) - (0.1 / (1 + h)) * (q - k).abs(),
        sliding_window(40) & document(torch.arange(202) // 15),
        compiled=False,
    ),
    "window": lambda: from_lse_function(window),
}
SIXTEEN_BITS = ("cpu", "longnet", "window")
