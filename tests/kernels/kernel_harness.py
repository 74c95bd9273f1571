"""Run a whole attention task by task with one kernel, as an executor would, and in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import helpers_attention
import torch
from helpers_attention import Inputs

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.problem import scale_is_exact
from quorum_attention.kernels import (
    CallShape,
    Gradients,
    InnerKernel,
    MaskShape,
    Statistics,
    TaskTensors,
    empty_,
    why_not,
)
from quorum_attention.kernels.scaling import Scaling


@dataclass
class Case:
    """An attention call; random inputs of the dtype, made on the CPU."""

    n_queries: int
    n_keys: int | None = None
    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads: int = 2
    key_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    causal: bool = False
    levels: tuple[int, ...] = (7,)
    layout: str = "aligned"
    tile: int = 16
    mask: torch.Tensor | None = None
    spread: float = 1.0
    shift: int = 0
    factor: float | None = None  # of the scores, where not the usual one
    seed: int = 0
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)
    grad_out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.n_keys = self.n_queries if self.n_keys is None else self.n_keys
        self.key_heads = self.heads if self.key_heads is None else self.key_heads
        self.value_dim = self.head_dim if self.value_dim is None else self.value_dim
        generator = torch.Generator().manual_seed(self.seed)

        def random(heads: int, rows: int, width: int) -> torch.Tensor:
            shape = (self.batch, heads, rows, width)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        self.query = random(self.heads, self.n_queries, self.head_dim) * self.spread
        self.key = random(self.key_heads, self.n_keys, self.head_dim)
        self.value = random(self.key_heads, self.n_keys, self.value_dim)
        self.grad_out = random(self.heads, self.n_queries, self.value_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.factor is None else self.factor

    def call(self, device: str) -> CallShape:
        mask = None
        if self.mask is not None:
            mask = MaskShape(self.mask.dtype == torch.bool, *(n > 1 for n in self.mask.shape))
        sizes = self.heads, self.key_heads, self.head_dim, self.value_dim
        return CallShape(
            device, self.dtype, *sizes, self.causal, True, mask, self.scale > 0,
            exact_scale=scale_is_exact(self.scale, self.dtype),
        )  # fmt: skip

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        if self.mask is None or self.mask.dtype != torch.bool:
            return None if self.mask is None else self.mask.to(dtype)
        return torch.zeros(self.mask.shape, dtype=dtype).masked_fill_(~self.mask, -torch.inf)


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor

    def items(self):
        return vars(self).items()


def exact(case: Case) -> Result:
    """The textbook, in float64, from the inputs as rounded to their dtype."""
    given = Inputs(case.query, case.key, case.value, case.grad_out)
    mask = case.additive_mask(case.dtype)
    found = helpers_attention.exact(
        given, mask=mask, is_causal=case.causal, scale=case.scale, gradients=True
    )
    assert found.grads is not None
    return Result(found.out, found.lse, *found.grads)


def run(kernel: InnerKernel, case: Case, device: str = "cpu", check: bool = True) -> Result:
    """Forward and backward over every task of the case's decomposition."""
    if check:
        assert why_not(kernel, case.call(device)) is None
    work = torch.float64 if case.dtype == torch.float64 else torch.float32

    def full(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=work, device=device)

    q, k, v, do = (t.to(device) for t in (case.query, case.key, case.value, case.grad_out))
    mask = case.additive_mask(case.dtype)
    mask = None if mask is None else mask.to(device)
    result = Result(full(do), full(do[..., 0]), full(q), full(k), full(v))
    empty_(result.out, result.lse)
    n_tokens = max(case.n_queries, case.n_keys)
    tasks = list(Decomposition(n_tokens, case.levels, case.layout, case.tile).tasks())
    for task in tasks:
        local, rows, keys = _task_tensors(case, task, q, k, v, mask)
        state = Statistics(_slot(result.out, rows), _slot(result.lse, rows))
        kernel.forward(local, state)
        result.out[:, :, rows], result.lse[:, :, rows] = state.out, state.lse
    out = result.out.to(case.dtype)
    for task in tasks:
        local, rows, keys = _task_tensors(case, task, q, k, v, mask)
        states = [(do, rows), (out, rows), (result.lse, rows)]
        states += [(result.grad_query, rows), (result.grad_key, keys), (result.grad_value, keys)]
        grads = Gradients(*(_slot(*state) for state in states), Scaling(case.shift))
        kernel.backward(local, grads)
        result.grad_query[:, :, rows] = grads.grad_query
        result.grad_key[:, :, keys] = grads.grad_key
        result.grad_value[:, :, keys] = grads.grad_value
    return Result(**{name: tensor.cpu() for name, tensor in result.items()})


def _slot(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathered rows as an executor holds them: a view of a slot with room for more."""
    gathered = tensor[:, :, index]
    slot = gathered.new_full(
        (*gathered.shape[:2], index.numel() + 8, *gathered.shape[3:]), torch.nan
    )
    return slot[:, :, : index.numel()].copy_(gathered)


def _task_tensors(
    case: Case, task: Task, *tensors: torch.Tensor | None
) -> tuple[TaskTensors, torch.Tensor, torch.Tensor]:
    q, k, v, mask = tensors
    tokens = torch.tensor(
        [t for s in task.spans for t in range(s.start, s.stop)], dtype=torch.int64
    )
    rows, keys = tokens[tokens < case.n_queries], tokens[tokens < case.n_keys]

    def bias(r: Rectangle) -> torch.Tensor | None:
        part = mask
        if part is not None and part.shape[2] > 1:
            part = part[:, :, rows[r.query_start : r.query_stop]]
        if part is not None and part.shape[3] > 1:
            part = part[:, :, :, keys[r.key_start : r.key_stop]]
        return part

    rectangles = task.rectangles(case.causal, n_queries=case.n_queries, n_keys=case.n_keys)
    return TaskTensors(
        task, tuple(rectangles), _slot(q, rows), _slot(k, keys), _slot(v, keys), case.scale,
        case.causal, bias, task.n_tokens, task.n_tokens,
    ), rows, keys  # fmt: skip


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Largest error of each result, as a share of its largest element."""
    found = {}
    for name, expected in reference.items():
        actual = getattr(result, name).double()
        assert not actual.isnan().any(), f"NaN in {name}"
        difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
        assert (difference < torch.inf).all(), f"{name} is infinite where it should not be"
        finite = expected[expected.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        # Some gradients are exactly 0; inputs are of size 1, so rounding is against that.
        found[name] = difference.max().item() / max(size, 1.0) if difference.numel() else 0.0
    return found


def check_nan_in_a_query(kernel: InnerKernel, case: Case, device: str = "cpu") -> None:
    """One element of a query is NaN: so are its output and gradient, no other row's, and the
    gradients of the keys that it sees."""
    row = case.n_queries // 2
    case.query[:, :, row, 0] = torch.nan
    result = run(kernel, case, device, check=False)
    others = torch.arange(case.n_queries) != row
    for name in ("out", "lse", "grad_query"):
        rows = getattr(result, name)
        assert bool(rows[:, :, others].isfinite().all()), name
        assert not bool(rows[:, :, row].isfinite().any()), name
    seen = row + 1 if case.causal else case.n_keys
    for name in ("grad_key", "grad_value"):
        assert bool(getattr(result, name)[:, :, :seen].isnan().all()), name


def rms_errors(result: Result, reference: Result) -> dict[str, float]:
    """Root mean square error of each result, as a share of its root mean square."""
    found = {}
    for name, expected in reference.items():
        actual = getattr(result, name).double()
        rows = expected.isfinite()
        norm = expected[rows].norm().item()
        found[name] = (actual - expected)[rows].norm().item() / max(norm, 1e-30)
    return found
