"""Finds out why a kernel is not recovered exactly; each experiment varies one thing.

The scores that a kernel used can be computed from its results: values that are 1 for a single key
give that key's weight, and weights and lse give the scores of all pairs. Any part of the sequence
has to give the weights and the lse that these scores lead to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from quorum_attention.checking import causes
from quorum_attention.checking.result import Broken
from quorum_attention.checking.trial import (
    CheckSizes,
    Trial,
    distance,
    exceeds,
    limit,
    rectangle,
    size,
    square,
    tokens,
)
from quorum_attention.decomposition import Decomposition, Span, Task
from quorum_attention.kernels import InnerKernel, Statistics, merge_
from quorum_attention.units import format_error

_TOKENS = 101
# Weights that differ by less are rounded, in as few bits as bfloat16 has.
_ROUNDED = 4e-3
# What may be wrong with the weights of a task, the worst first.
_OF_A_TASK = (
    (causes.NO_KEYS, "a task"),
    (causes.PAIRS, "a task computes pairs of another"),
    (causes.POSITIONS, "a task gives weight to pairs that the whole call does not keep"),
    (causes.PAIRS, "a task leaves pairs out"),
    (causes.POSITIONS, "the weights of a task differ from those of the whole call"),
    (causes.NO_KEYS, "rows of a task without a kept key have weights"),
    (causes.PRECISION, "the weights of a task are only close to those of the whole call"),
    (causes.LSE, "a task"),
)
# Of gradients, by dtype: the step as a share of the inputs, and how much slopes may differ: by the
# error of a central difference of fourth order, plus rounding divided by the step.
_STEPS = {torch.float64: 2e-3, torch.float32: 3e-2, torch.float16: 6e-2, torch.bfloat16: 0.12}
_LIMITS = {torch.float64: 1e-3, torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.4}


def small(sizes: CheckSizes) -> CheckSizes:
    """The sizes of experiments: square, and short."""
    n = min(_TOKENS, sizes.n_queries, sizes.n_keys)
    return replace(sizes, n_queries=n, n_keys=n)


def writes_into_inputs(kernel: InnerKernel, sizes: CheckSizes, causal: bool, seed: int) -> bool:
    """Whether a call writes into what it is handed, which may be the caller's."""
    handed = list(sizes.inputs(seed))
    trial = Trial(kernel, tuple(handed), square(sizes.n_keys), causal)
    kept = [t.clone() for t in handed]
    rows = trial.forward()
    same = all(map(torch.equal, kept, handed))
    if same and sizes.needs_grad:
        handed += [rows.out, rows.lse]
        kept = [t.nan_to_num() for t in handed]
        trial.backward(rows)
        same = all(map(torch.equal, kept, (t.nan_to_num() for t in handed)))
    return not same


def views_differ(kernel: InnerKernel, sizes: CheckSizes, causal: bool, seed: int) -> bool:
    """Whether views of larger tensors, whose other elements are quite different, change results."""
    inputs = sizes.inputs(seed)

    def within(tensor: torch.Tensor) -> torch.Tensor:
        b, h, n, d = tensor.shape
        room = torch.full((b, h + 1, n + 5, d + 8), 7.0, dtype=tensor.dtype, device=tensor.device)
        return room[:, :h, 2 : n + 2, :d].copy_(tensor)

    found = []
    for tensors in (inputs, tuple(map(within, inputs))):
        trial = Trial(kernel, tensors, square(sizes.n_keys), causal)
        rows = trial.forward()
        found.append([rows.out, rows.lse, *(trial.backward(rows) if sizes.needs_grad else ())])
    most = limit(inputs[0], inputs[1], found[0][1], sizes.head_dim**-0.5)
    return any(exceeds(a, b, most) for a, b in zip(*found, strict=True))


def scale_is_ignored(kernel: InnerKernel, sizes: CheckSizes, causal: bool, seed: int) -> str:
    """What is wrong where twice the scale changes nothing, and twice the queries do; or ""."""
    query, *rest = sizes.inputs(seed)
    scale, task = sizes.head_dim**-0.5, square(sizes.n_keys)

    def out(query: torch.Tensor, scale: float) -> torch.Tensor:
        return Trial(kernel, (query, *rest), task, causal, scale).forward().out

    usual = out(query, scale)
    ignored = torch.equal(usual, out(query, 2 * scale))
    return "the scale is ignored" if ignored and exceeds(out(2 * query, scale), usual, 1e-2) else ""


def causal_is_not_plain(kernel: InnerKernel, sizes: CheckSizes, causal: bool, seed: int) -> str:
    """What is wrong where the last row of a causal call, which sees all keys, is not that of a
    plain one; or "" (as where the kernel does not take both)."""
    if not causal or kernel.refusal(replace(sizes, is_causal=False)) is not None:
        return ""
    inputs, task = sizes.inputs(seed), square(sizes.n_keys)
    one, other = (Trial(kernel, inputs, task, c).forward() for c in (True, False))
    most = limit(inputs[0], inputs[1], other.lse, sizes.head_dim**-0.5)
    same = not exceeds(one.out[:, :, -1], other.out[:, :, -1], most)
    return "" if same else "the last row of a causal call does not see all keys"


def wrong_weights(
    kernel: InnerKernel, sizes: CheckSizes, kinds: list[bool], seed: int
) -> list[Broken]:
    """What is wrong with the forward of tasks.

    Args:
        kinds: plain (False), causal (True), or both, of those that the kernel takes.
    """
    return _Weights(kernel, sizes, kinds, seed).wrong()


class _Weights:
    """Weights and scores of one batch entry."""

    def __init__(
        self, kernel: InnerKernel, sizes: CheckSizes, kinds: list[bool], seed: int
    ) -> None:
        self.kernel, self.sizes, self.kinds = kernel, replace(sizes, batch_shape=(1,)), kinds
        self.inputs, self.n = self.sizes.inputs(seed), sizes.n_keys
        self.tolerance = max(2e-5, 16 * torch.finfo(sizes.dtype).eps)
        # The call to compare with: plain if the kernel takes that, because it has all pairs.
        self.base_causal = False not in kinds

    def wrong(self) -> list[Broken]:
        """What is wrong, as far as it can be told."""
        if any(map(self._overwrites, self.kinds)):
            return [Broken(causes.PAIRS, "statistics of earlier tasks are lost")]
        whole = self._trial(square(self.n), self.base_causal)
        shares, lse = whole.weights()
        if shares.isnan().any() or lse.isnan().any() or (lse == torch.inf).any():
            return [Broken(causes.NO_KEYS, "an uncut call")]
        group = self.sizes.heads // self.sizes.kv_heads
        wanted = shares @ whole.tensors[2].double().repeat_interleave(group, dim=1)
        total = shares.sum(dim=-1)
        live = total[(total != 0) | (lse != -torch.inf)]
        off = float(distance(whole.forward().out, wanted).max()) / size(wanted) / 4
        if live.numel():
            off = max(off, float((live - 1).abs().max()))
        if off > self.tolerance:
            sums = f"they add up to {float(live.min()):.4g} to {float(live.max()):.4g}"
            cause = causes.WEIGHTS if off > max(_ROUNDED, self.tolerance) else causes.PRECISION
            return [Broken(cause, f"weights of an uncut call, {sums}")]
        return self._of_tasks(torch.log(shares) + lse.unsqueeze(-1))

    def _of_tasks(self, scores: torch.Tensor) -> list[Broken]:
        found = []
        both = len(self.kinds) > 1
        causal_is_off = self._difference(square(self.n), True, scores) if both else None
        worst = self._worst(_parts(self.n), [True], scores)
        if worst is None:
            tasks = [Decomposition(self.n, (c,), "balanced").task((1,)) for c in (3, 7)]
            kinds = [c for c in self.kinds if not c or causal_is_off is None]
            worst = self._worst(tasks, kinds, scores)
        if worst is not None:
            found.append(Broken(*_OF_A_TASK[worst]))
        if causal_is_off is not None:
            cause, _ = _OF_A_TASK[causal_is_off]
            cause = causes.PAIRS if cause == causes.POSITIONS else cause
            where = "a causal call differs from a plain one without the later keys"
            found.append(Broken(cause, where))
        return found

    def _worst(self, tasks: Iterable[Task], kinds: list[bool], scores: torch.Tensor) -> int | None:
        found = [self._difference(task, causal, scores) for task in tasks for causal in kinds]
        return min((number for number in found if number is not None), default=None)

    def _trial(self, task: Task, causal: bool) -> Trial:
        at = tokens(task, self.sizes.device)
        return Trial(self.kernel, [t[:, :, at] for t in self.inputs], task, causal)

    def _overwrites(self, causal: bool) -> bool:
        """Whether what was merged before is lost."""
        trial = self._trial(square(self.n), causal)
        first = trial.forward()
        before = Statistics(torch.ones_like(first.out), torch.full_like(first.lse, 2.0))
        after = trial.forward(Statistics(before.out.clone(), before.lse.clone()))
        merge_(before.out, before.lse, first.out, first.lse)
        return exceeds(after.out, before.out, 1e-2) or exceeds(after.lse, before.lse, 1e-2)

    def _difference(self, task: Task, causal: bool, whole: torch.Tensor) -> int | None:
        """How the weights of a task differ from those by the whole sequence's scores: a number of
        ``_OF_A_TASK``."""
        shares, found_lse = self._trial(task, causal).weights()
        at = tokens(task, self.sizes.device)
        keep = torch.from_numpy(task.mask()).to(at.device)
        if causal or self.base_causal:
            keep = keep.tril()
        scores = whole[:, :, at][..., at].masked_fill(~keep, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        empty = lse == -torch.inf
        wanted = torch.exp(scores - lse.masked_fill(empty, 0.0).unsqueeze(-1))
        nan = shares.isnan().any(dim=-1) | found_lse.isnan() | (found_lse == torch.inf)
        nan |= empty & (found_lse != -torch.inf) & ~(shares > 0).any(dim=-1)
        shares = shares.nan_to_num(nan=0.0)
        seen = shares > 0  # a masked pair has a weight of exactly 0
        extra = seen & keep & (scores == -torch.inf)
        filled = (empty & (extra | ~keep).all(dim=-1)) | ~extra.any(dim=-1)
        live = ~(nan | empty)
        lost = (wanted > self.tolerance) & (shares == 0) & live.unsqueeze(-1)
        off = float((shares - wanted).abs().amax(dim=-1).masked_fill(~live, 0.0).max())
        lse_off = float(torch.where(live, found_lse - lse, 0.0).abs().max())
        differs = (
            nan.any(), (seen & ~keep).any(), extra.any() and not filled.all(), lost.any(),
            off > max(_ROUNDED, self.tolerance), extra.any(), off > self.tolerance,
            lse_off > self.tolerance * max(1.0, size(lse)),
        )  # fmt: skip
        return next((number for number, wrong in enumerate(differs) if wrong), None)


def _parts(n: int) -> Iterator[Task]:
    """Some later rows against some earlier keys."""
    first, second = n // 3, 2 * n // 3
    yield rectangle((0, second), (second, n))
    yield rectangle((first, second), (second, n))
    yield rectangle((first + 1, second - 2), (second + 1, n))
    # Keys with a gap: a bias by local positions shifts all scores of a run alike.
    yield Task((0,), (Span(0, first // 2, 1), Span(first, second, 1), Span(second, n, 2)))


def wrong_gradients(kernel: InnerKernel, sizes: CheckSizes, causal: bool, seed: int) -> str:
    """Which gradient of an uncut call is none of its forward, and how far off; "" if all are right.

    The change of ``sum(grad_out * out)`` between two inputs is compared with the change by the
    gradients, head by head: that needs nothing but the two passes.

    Raises:
        RuntimeError: the forward is too rough to tell.
    """
    trial = Trial(kernel, sizes.inputs(seed), square(sizes.n_keys), causal)
    grads = trial.backward(trial.forward())
    generator = torch.Generator().manual_seed(seed)
    for index, name in enumerate(("grad_query", "grad_key", "grad_value")):
        for _ in range(3):
            shape = trial.tensors[index].shape
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            error, most = _slope(trial, index, grads[index], drawn.to(sizes.device))
            if error > most:
                return f"{name} off by {format_error(error)} of its size"
            if most == torch.inf:
                raise RuntimeError(f"{name}: the forward is too rough for steps along it")
    return ""


def _slope(
    trial: Trial, index: int, grad: torch.Tensor, direction: torch.Tensor
) -> tuple[float, float]:
    """The error of a gradient in one direction, and how much of it steps and rounding explain."""
    here, dtype = trial.tensors[index], trial.tensors[3].dtype
    step = direction * _STEPS[dtype] * (float(here.double().square().mean().sqrt()) or 1.0)
    first, change = _change(trial, index, step)
    second, half = _change(trial, index, step / 2)
    wide = dtype in (torch.float64, torch.float32)
    # In this combination of the two steps the error of second order cancels.
    measured = (8 * second - first) / 6 if wide else second
    moved = (8 * half - change) / 6 if wide else half
    said = _by_head(trial, grad.double() * moved)
    # The expected size of such a sum: a gradient times random steps.
    count = _by_head(trial, torch.ones_like(moved))
    squares = _by_head(trial, grad.double().square()) * _by_head(trial, moved.square())
    scale = torch.maximum((squares / count).sqrt(), measured.abs())
    # Heads whose gradient is 0 have no size of their own.
    scale = scale.clamp_min(float(scale.max()) * 1e-4).clamp_min(1e-300)
    error = float(((measured - said).abs() / scale).nan_to_num(nan=torch.inf).max())
    rough = float(((2 * second - first).abs() / scale).nan_to_num(nan=torch.inf).max())
    # A forward that has kinks or rounds has about the same error for both steps.
    return (0.0, torch.inf) if rough > 0.2 and wide else (error, _LIMITS[dtype] + 4 * rough)


def _change(trial: Trial, index: int, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(change of the result by key head, change of the input after rounding)."""
    here = trial.tensors[index]
    above, below = ((here.double() + sign * by).to(here.dtype) for sign in (1, -1))
    results = [trial.moved(index, t).forward().out.double() for t in (above, below)]
    grad_out = trial.tensors[3].double()
    return _by_head(trial, (results[0] - results[1]) * grad_out), above.double() - below.double()


def _by_head(trial: Trial, tensor: torch.Tensor) -> torch.Tensor:
    """Sums by batch entry and key head."""
    batch, heads = trial.tensors[1].shape[:2]
    return tensor.sum(dim=(2, 3)).reshape(batch, heads, -1).sum(dim=2)
