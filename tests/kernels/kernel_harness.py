"""Run a whole attention task by task with one kernel, as an executor would, and in
float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import helpers.attention
import torch
from helpers.attention import Inputs, error

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.kernels import (
    BiasShape,
    CallShape,
    Gradients,
    InnerKernel,
    Statistics,
    TaskTensors,
    empty_,
    why_not,
)
from quorum_attention.kernels.call_shape import scale_is_exact
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.scaling import Scaling

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
Result = dict[str, torch.Tensor]


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
    dropout: Dropout | None = None
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)
    grad_out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.n_keys = self.n_queries if self.n_keys is None else self.n_keys
        self.key_heads = self.heads if self.key_heads is None else self.key_heads
        self.value_dim = self.head_dim if self.value_dim is None else self.value_dim
        generator = torch.Generator().manual_seed(self.seed)

        def normal(heads: int, rows: int, width: int) -> torch.Tensor:
            shape = (self.batch, heads, rows, width)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(
                self.dtype
            )

        self.query = normal(self.heads, self.n_queries, self.head_dim) * self.spread
        self.key = normal(self.key_heads, self.n_keys, self.head_dim)
        self.value = normal(self.key_heads, self.n_keys, self.value_dim)
        self.grad_out = normal(self.heads, self.n_queries, self.value_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.factor is None else self.factor

    def call(self, device: str) -> CallShape:
        mask = None
        if self.mask is not None:
            mask = BiasShape(*(n > 1 for n in self.mask.shape))
        sizes = self.heads, self.key_heads, self.head_dim, self.value_dim
        return CallShape(
            device, self.dtype, *sizes, self.causal, True, mask, self.scale > 0,
            exact_scale=scale_is_exact(self.scale, self.dtype),
        )  # fmt: skip


def random_case(
    r: random.Random,
    dtype: torch.dtype,
    most: int,
    dropout: bool,
    heads: Sequence[int] = (1, 2, 4),
) -> Case:
    """Grouped heads, masks that leave rows no key, and scales of either sign."""
    key_heads, n, m = r.choice(heads), r.randint(1, most), r.randint(1, most)
    case = Case(
        n, m, dtype, r.choice([1, 1, 2, 3]), key_heads * r.choice([1, 2, 3]), key_heads,
        r.randint(1, 9), r.randint(1, 9), r.random() < 0.5, r.choice([(), (3,), (7,), (3, 3)]),
        tile=r.choice([1, 4, 16]), factor=r.choice([0.4, -0.3, 0.0]), seed=r.randrange(1 << 30),
        dropout=Dropout(r.choice([0.1, 0.5, 0.9]), r.randrange(2**63), 5, 2) if dropout else None,
    )  # fmt: skip
    if r.random() < 0.4:
        sizes = [r.choice([1, size]) for size in (case.batch, case.heads, n, m)]
        mask = torch.randn(sizes).masked_fill(torch.rand(sizes) < 0.3, -torch.inf)
        case.mask = mask.to(dtype)  # as kernels are given it, if it is not wider
    return case


def exact(case: Case) -> Result:
    """The textbook, in float64, from the inputs as rounded to their dtype."""
    given = Inputs(case.query, case.key, case.value, case.grad_out)
    found = helpers.attention.exact(
        given, mask=case.mask, is_causal=case.causal, scale=case.scale, gradients=True,
        dropout=case.dropout,
    )  # fmt: skip
    assert found.grads is not None
    return dict(zip(NAMES, (found.out, found.lse, *found.grads), strict=True))


def run(
    kernel: InnerKernel, case: Case, device: str = "cpu", check: bool = True
) -> Result:
    """Forward and backward over every task of the case's decomposition."""
    if check:
        assert why_not(kernel, case.call(device)) is None
    work = torch.float64 if case.dtype == torch.float64 else torch.float32
    q, k, v, do = (
        t.to(device) for t in (case.query, case.key, case.value, case.grad_out)
    )
    mask = case.mask
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        mask = mask.to(device, case.dtype)
    likes = (do, do[..., 0], q, k, v)
    result = {
        n: torch.zeros(t.shape, dtype=work, device=device)
        for n, t in zip(NAMES, likes, strict=True)
    }
    empty_(result["out"], result["lse"])
    n_tokens = max(case.n_queries, case.n_keys)
    tasks = list(Decomposition(n_tokens, case.levels, case.layout, case.tile).tasks())
    for task in tasks:
        local, rows, keys = _task_tensors(case, task, q, k, v, mask)
        state = Statistics(*(_slot(result[name], rows) for name in NAMES[:2]))
        kernel.forward(local, state)
        result["out"][:, :, rows], result["lse"][:, :, rows] = state.out, state.lse
    out = result["out"].to(case.dtype)
    for task in tasks:
        local, rows, keys = _task_tensors(case, task, q, k, v, mask)
        at = dict(zip(NAMES[2:], (rows, keys, keys), strict=True))
        read = (_slot(t, rows) for t in (do, out, result["lse"]))
        sums = {name: _slot(result[name], where) for name, where in at.items()}
        kernel.backward(local, Gradients(*read, **sums, scaling=Scaling(case.shift)))
        for name, where in at.items():
            result[name][:, :, where] = sums[name]
    return {name: tensor.cpu() for name, tensor in result.items()}


def _slot(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathered rows as an executor holds them: a view of a slot with room for more."""
    gathered = tensor[:, :, index]
    shape = (*gathered.shape[:2], index.numel() + 8, *gathered.shape[3:])
    return gathered.new_full(shape, torch.nan)[:, :, : index.numel()].copy_(gathered)


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

    rectangles = task.rectangles(
        case.causal, n_queries=case.n_queries, n_keys=case.n_keys
    )
    return TaskTensors(
        task, tuple(rectangles), _slot(q, rows), _slot(k, keys), _slot(v, keys), case.scale,
        case.causal, bias, task.n_tokens, task.n_tokens, dropout=case.dropout,
    ), rows, keys  # fmt: skip


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Largest error of each result, as a share of its largest element; infinite where a
    number should be finite and is not."""
    return {name: error(result[name], wanted) for name, wanted in reference.items()}


def check_nan_in_a_query(kernel: InnerKernel, case: Case, device: str = "cpu") -> None:
    """One element of a query is NaN: so are its output and gradient, no other row's,
    and the gradients of the keys that it sees."""
    row = case.n_queries // 2
    case.query[:, :, row, 0] = torch.nan
    result = run(kernel, case, device, check=False)
    others = torch.arange(case.n_queries) != row
    for name in ("out", "lse", "grad_query"):
        assert bool(result[name][:, :, others].isfinite().all()), name
        assert not bool(result[name][:, :, row].isfinite().any()), name
    seen = row + 1 if case.causal else case.n_keys
    for name in ("grad_key", "grad_value"):
        assert bool(result[name][:, :, :seen].isnan().all()), name


def rms_errors(result: Result, reference: Result) -> dict[str, float]:
    """Root mean square error of each result, as a share of its root mean square."""
    found = {}
    for name, expected in reference.items():
        rows = expected.isfinite()
        off = (result[name].double() - expected)[rows].norm().item()
        found[name] = off / max(expected[rows].norm().item(), 1e-30)
    return found
