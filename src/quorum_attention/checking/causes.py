"""What is likely wrong with a kernel whose cut calls differ from the uncut one.

Each test takes away one part of what a decomposition does, on one task at a time, so that the first
that fails names the part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.masks import no_bias
from quorum_attention.kernels import InnerKernel, Statistics, TaskTensors, empty_

LSE = (
    "the log-sum-exp: keys in two halves do not merge to the whole (missing, not natural log, or "
    "not of the scores that the output was made with)"
)
POSITIONS = (
    "positions: they are taken within the task, not in the whole sequence (ask for "
    "query_positions and key_positions, or use TaskTensors.task)"
)
TWICE = "pairs counted more than once (the diagonal of a chunk belongs to the task that owns it)"
MISSING = "pairs left out (every rectangle of a task has to be computed)"
DIAGONAL = "causal rectangles: cut along the diagonal they do not add up to the whole"
UNKNOWN = (
    "none of those that are looked for (log-sum-exp, positions, pairs counted twice or left out)"
)
BACKWARD = "the backward: the forward is exact, the gradients of rectangles do not add up"


def likely_cause(kernel: InnerKernel, inputs: Sequence[torch.Tensor], is_causal: bool) -> str:
    """The likely cause, in words.

    Args:
        kernel: the kernel.
        inputs: query, key, value and grad_out of the call that came out wrong, one batch entry.
        is_causal: whether that call was causal.
    """
    query, key, value = inputs[:3]
    n = min(query.shape[2], key.shape[2])
    tensors = [t[:, :, :n] for t in (query, key, value)]
    whole = Decomposition(n, ()).task(())
    half = n // 2
    every = Rectangle(0, n, 0, n)
    if is_causal:
        every = Rectangle(half, n, 0, half)
    middle = (every.key_start + every.key_stop) // 2
    halves = (
        Rectangle(every.query_start, n, every.key_start, middle),
        Rectangle(every.query_start, n, middle, every.key_stop),
    )
    if _differ(kernel, tensors, whole, (every,), halves, is_causal):
        # Right but for where it thinks the keys are, or wrong wherever they are?
        return POSITIONS if _lse_follows_scores(kernel, tensors, whole, every) else LSE
    counted = _counted(kernel, tensors, is_causal)
    if counted is not None:
        return counted
    task = Decomposition(n, (3,), "aligned", 16).task((1,))
    if _depends_on_task(kernel, tensors, task, whole, is_causal):
        return POSITIONS
    if is_causal:
        one = (Rectangle(0, n, 0, n, causal=True),)
        cut = (
            Rectangle(0, half, 0, half, causal=True),
            Rectangle(half, n, 0, half),
            Rectangle(half, n, half, n, causal=True),
        )
        if _differ(kernel, tensors, whole, one, cut, True):
            return DIAGONAL
    return BACKWARD if _forward_is_exact(kernel, tensors, is_causal) else UNKNOWN


def _statistics(
    kernel: InnerKernel,
    tensors: Sequence[torch.Tensor],
    task: Task,
    rectangles: Sequence[Rectangle],
    is_causal: bool,
) -> Statistics:
    query, key, value = tensors
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=work, device=query.device)
    state = Statistics(out, out.new_zeros(query.shape[:3]))
    empty_(state.out, state.lse)
    n = max(query.shape[2], key.shape[2])
    kernel.forward(
        TaskTensors(task, tuple(rectangles), query, key, value, query.shape[3] ** -0.5, is_causal,
                    no_bias, n, n),
        state,
    )  # fmt: skip
    return state


def _far(one: Statistics, other: Statistics, dtype: torch.dtype) -> bool:
    limit = 256 * torch.finfo(dtype).eps
    for mine, wanted in ((one.out, other.out), (one.lse, other.lse)):
        apart = torch.where(mine == wanted, 0.0, (mine - wanted).abs()).nan_to_num(nan=torch.inf)
        finite = wanted[wanted.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 1.0
        if float(apart.max()) > limit * max(size, 1e-30):
            return True
    return False


def _differ(
    kernel: InnerKernel,
    tensors: Sequence[torch.Tensor],
    task: Task,
    one: Sequence[Rectangle],
    other: Sequence[Rectangle],
    is_causal: bool,
) -> bool:
    """Whether the same pairs, covered in two ways, give two results."""
    first, second = (_statistics(kernel, tensors, task, p, is_causal) for p in (one, other))
    return _far(first, second, tensors[0].dtype)


def _counted(kernel: InnerKernel, tensors: Sequence[torch.Tensor], is_causal: bool) -> str | None:
    """With queries of 0 every score of plain attention is 0, and the lse counts pairs. What else
    a kernel adds to scores depends on positions, which are the same in a cut call."""
    query, key, value = tensors
    zero = [torch.zeros_like(query), key, value]
    n = query.shape[2]
    shape = Decomposition(n, (3,), "aligned", 16)
    whole = Decomposition(n, ()).task(())
    expected = _statistics(kernel, zero, whole, whole.rectangles(is_causal), is_causal).lse
    pieces = []
    for task in shape.tasks():
        rows = _tokens(task, query.device)
        local = [t[:, :, rows] for t in zero]
        pieces.append((rows, _statistics(kernel, local, task, task.rectangles(is_causal),
                                         is_causal).lse))  # fmt: skip
    total = torch.full_like(expected, -torch.inf)
    for rows, lse in pieces:
        total[:, :, rows] = torch.logaddexp(total[:, :, rows], lse)
    apart = (total.double() - expected.double()).nan_to_num(nan=0.0)
    limit = 1e-3 if query.dtype in (torch.float32, torch.float64) else 3e-2
    if not float(apart.abs().max()) > limit:
        return None
    # Positions taken within a task may move an lse both ways; counts go one way.
    if float(apart.min()) >= -limit:
        return TWICE if _plain(kernel, zero, whole) else None
    if float(apart.max()) <= limit:
        return MISSING if _plain(kernel, zero, whole) else None
    return None


def _lse_follows_scores(
    kernel: InnerKernel, tensors: Sequence[torch.Tensor], whole: Task, every: Rectangle
) -> bool:
    """Whether a constant added to all scores of a row is added to its lse."""
    query, key, value = (t.clone() for t in tensors)
    key[..., 0] = 1.0
    lifted = query.clone()
    lifted[..., 0] += 1.0
    low, high = (
        _statistics(kernel, (q, key, value), whole, (every,), False).lse for q in (query, lifted)
    )
    rows = slice(every.query_start, every.query_stop)
    moved = (high - low)[:, :, rows].double() - query.shape[3] ** -0.5
    return bool((moved.nan_to_num(nan=torch.inf).abs() < 2e-2).all())


def _plain(kernel: InnerKernel, zero: Sequence[torch.Tensor], whole: Task) -> bool:
    """Whether with queries of 0 the lse of an uncut call really counts keys."""
    n = zero[0].shape[2]
    lse = _statistics(kernel, zero, whole, (Rectangle(0, n, 0, n),), False).lse
    wanted = torch.log(torch.tensor(float(n)))
    return bool(((lse.cpu() - wanted).abs() < 1e-2).all())


def _depends_on_task(
    kernel: InnerKernel, tensors: Sequence[torch.Tensor], task: Task, whole: Task, is_causal: bool
) -> bool:
    """Whether the pairs of a task come out differently in the task and in the whole sequence."""
    rows = _tokens(task, tensors[0].device)
    local = [t[:, :, rows] for t in tensors]
    rectangles = [
        r for r in task.rectangles(is_causal)
        if len(task.segments(r.query_start, r.query_stop)) == 1
        and len(task.segments(r.key_start, r.key_stop)) == 1
    ]  # fmt: skip
    mine = _statistics(kernel, local, task, rectangles, is_causal)
    moved = []
    for r in rectangles:
        ((q0, q1, _),) = task.segments(r.query_start, r.query_stop)
        ((k0, k1, _),) = task.segments(r.key_start, r.key_stop)
        moved.append(Rectangle(q0, q1, k0, k1, r.causal))
    theirs = _statistics(kernel, tensors, whole, moved, is_causal)
    there = Statistics(theirs.out[:, :, rows], theirs.lse[:, :, rows])
    return _far(mine, there, tensors[0].dtype)


def _forward_is_exact(
    kernel: InnerKernel, tensors: Sequence[torch.Tensor], is_causal: bool
) -> bool:
    n = tensors[0].shape[2]
    whole = Decomposition(n, ()).task(())
    expected = _statistics(kernel, tensors, whole, whole.rectangles(is_causal), is_causal)
    state = Statistics(torch.zeros_like(expected.out), torch.zeros_like(expected.lse))
    empty_(state.out, state.lse)
    from quorum_attention.kernels import merge_

    for task in Decomposition(n, (3,), "aligned", 16).tasks():
        rows = _tokens(task, tensors[0].device)
        part = _statistics(kernel, [t[:, :, rows] for t in tensors], task,
                           task.rectangles(is_causal), is_causal)  # fmt: skip
        out, lse = state.out[:, :, rows], state.lse[:, :, rows]
        merge_(out, lse, part.out, part.lse)
        state.out[:, :, rows], state.lse[:, :, rows] = out, lse
    return not _far(state, expected, tensors[0].dtype)


def _tokens(task: Task, device: torch.device) -> torch.Tensor:
    runs = [torch.arange(start, stop) for start, stop, _ in task.runs]
    return torch.cat(runs).to(device)
