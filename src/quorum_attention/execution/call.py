"""One pass of a call with its tensors: what it reads and the results it makes.

Numbers of an fp32 gradient for fp16 inputs may be too large or too small for fp16. All results of a
backward are linear in the upstream gradient. So it is divided by a power of two for each key/value
head, and the finished gradients are multiplied by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import itemgetter

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.execution.device.allocate import empty_result
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.streams import KernelStreams
from quorum_attention.execution.problem import (
    Axis,
    Group,
    InputSpec,
    PassSpec,
    Problem,
    StateSpec,
    group_part,
)
from quorum_attention.execution.report import PassReport
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.protocol import (
    Bias,
    BiasShape,
    CallShape,
    InnerKernel,
    TaskTensors,
    is_rounded,
)
from quorum_attention.kernels.scaling import power_of_two


def bias_shape(mask: torch.Tensor, batch_dims: int, dtype: torch.dtype) -> BiasShape:
    """Which dimensions of (*batch, heads, rows, columns) a broadcastable ``mask`` varies over, and
    whether inputs of ``dtype`` would round it."""
    sizes = (1,) * (batch_dims + 3 - mask.dim()) + tuple(mask.shape)
    return BiasShape(
        batch=any(n > 1 for n in sizes[:batch_dims]),
        heads=sizes[batch_dims] > 1,
        rows=sizes[batch_dims + 1] > 1,
        columns=sizes[batch_dims + 2] > 1,
        wide=is_rounded(mask.dtype, dtype),
    )


class BiasView:
    """A call's mask, boolean or additive.

    Args:
        mask: broadcastable to (*batch, heads, n_queries, n_keys), on any device.
        batch_dims: number of batch dimensions of the call.
    """

    def __init__(self, mask: torch.Tensor, batch_dims: int) -> None:
        missing = batch_dims + 3 - mask.dim()
        self.mask = mask.reshape((1,) * missing + tuple(mask.shape)) if missing else mask

    def bias(self, group: Group, task: Task, dtype: torch.dtype, device: torch.device) -> Bias:
        """The function that gives a kernel the additive mask of a rectangle of ``task``: (b|1,
        heads|1, queries|1, keys|1) of ``dtype`` on ``device``."""
        blocks = self._blocks(group)

        def of(rectangle: Rectangle) -> torch.Tensor:
            rows = task.segments(rectangle.query_start, rectangle.query_stop)
            columns = task.segments(rectangle.key_start, rectangle.key_stop)
            rows, columns = _pieces(blocks[0], 2, rows), _pieces(blocks[0], 3, columns)
            if self.mask.dtype == dtype and len(blocks) == len(rows) == len(columns) == 1:
                return blocks[0][:, :, slice(*rows[0][:2]), slice(*columns[0][:2])].to(device)
            return _gathered(blocks, rows, columns, dtype).to(device)

        return of

    def whole(
        self, dtype: torch.dtype, device: torch.device, batch_shape: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The whole mask, additive: (b|1, heads|1, rows|1, columns|1), not expanded. Calls with
        several batch dimensions name them, because a mask may have to be copied there."""
        rest = self.mask.shape[-3:]
        mask = self.mask.expand(*batch_shape, *rest) if len(batch_shape) > 1 else self.mask
        mask = (mask if mask.dim() == 4 else mask.reshape(-1, *rest)).to(device)
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        return torch.where(mask, torch.zeros((), dtype=dtype, device=device), -torch.inf)

    def _blocks(self, group: Group) -> list[torch.Tensor]:
        """Views (entries, heads|1, rows|1, columns|1): one for each run of entries along the last
        batch dimension, or one of a single entry for all of them."""
        batch_sizes = self.mask.shape[:-3]
        numbers_of_entries = group.entry_numbers
        if all(n == 1 for n in batch_sizes):
            numbers_of_entries = numbers_of_entries[:1]
        entries = map(group.index_of, numbers_of_entries)
        blocks = []
        for outer, run in groupby(entries, itemgetter(slice(None, -1))):
            numbers = list(run)
            index = tuple(0 if n == 1 else i for i, n in zip(outer, batch_sizes, strict=False))
            block = self.mask[index] if batch_sizes else self.mask.unsqueeze(0)
            if block.shape[0] == 1:
                block = block.expand(len(numbers), -1, -1, -1)
            else:
                block = block[numbers[0][-1] : numbers[0][-1] + len(numbers)]
            blocks.append(block if block.shape[1] == 1 else block[:, group.query_heads])
        return blocks


def _pieces(block: torch.Tensor, dim: int, segments: list[Rows]) -> list[Rows]:
    """``segments``, or the only position of a dimension that the mask broadcasts over."""
    return segments if block.shape[dim] > 1 else [Rows(0, 1, segments[0].local)]


def _gathered(
    blocks: list[torch.Tensor], rows: list[Rows], columns: list[Rows], dtype: torch.dtype
) -> torch.Tensor:
    """One rectangle of all blocks, additive; allocates only the result."""
    first, counts = blocks[0], [block.shape[0] for block in blocks]
    sides = (sum(piece.length for piece in pieces) for pieces in (rows, columns))
    shape = (sum(counts), first.shape[1], *sides)
    bias = torch.empty(shape, dtype=dtype, device=first.device)
    kept = torch.zeros((), dtype=dtype, device=first.device)
    masked = torch.full((), float("-inf"), dtype=dtype, device=first.device)
    for target, block in zip(bias.split(counts), blocks, strict=True):
        for down, across in product(rows, columns):
            top, left = down.local - rows[0].local, across.local - columns[0].local
            source = block[:, :, down.start : down.stop, across.start : across.stop]
            piece = target[:, :, top : top + down.length, left : left + across.length]
            if source.dtype == torch.bool:
                torch.where(source, kept, masked, out=piece)
            else:
                piece.copy_(source)
    return bias


def no_bias(rectangle: Rectangle) -> None:
    """The bias of a call without a mask."""
    return


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def has_readable_rows(tensor: torch.Tensor) -> bool:
    """Whether operators can read ``tensor`` without a copy.

    The last dimension has to be contiguous, and no row may begin within another: torch's operators
    refuse such rows on some processors, and write their output as if it were not so. On a GPU every
    row also has to start at a multiple of a word (16 bytes): operators refuse other rows, or fail
    with misaligned addresses. Rows whose length is no multiple of a word may start anywhere,
    because they are padded, which copies them.
    """
    if not tensor.is_contiguous():
        *sizes, width = tensor.shape
        *steps, step = tensor.stride()
        if step != 1 and width > 1:
            return False
        # Rows may be all the same.
        if True in [n > 1 and 0 < s < width for n, s in zip(sizes, steps, strict=True)]:
            return False
    word = backend_of(tensor.device).word_bytes
    return word == 1 or _at_whole_words(tensor, word)


def are_kernel_readable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether operators can read the inputs without a copy: their rows are dense, and results can
    have the query's strides."""
    steps = query.stride()
    if backend_of(query.device).word_bytes == 1:
        # torch's operator on a CPU lays its output out as the query, and gives it no dense rows
        # where a dimension of one entry has steps of one number, beside an expanded one.
        laid_out = steps.count(1) < 2 or 0 not in steps
    else:
        laid_out = all(n <= 1 or s > 0 for n, s in zip(query.shape, steps, strict=True))
    return laid_out and all(map(has_readable_rows, (query, key, value)))


def _at_whole_words(tensor: torch.Tensor, word: int) -> bool:
    size = tensor.element_size()
    if tensor.shape[-1] * size % word:
        return True
    steps = (s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1)
    return tensor.data_ptr() % word == 0 and not any(s * size % word for s in steps)


def is_kernel_readable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operators can read an upstream gradient or an output without a copy."""
    return tensor.dtype == dtype and 0 not in tensor.stride() and has_readable_rows(tensor)


def as_kernel_readable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of an upstream gradient or of an output as operators can read it: of ``dtype``, in
    dense rows, not expanded (the gradient of a sum is). Copies it only if it is not so already."""
    if is_kernel_readable(tensor, dtype):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def flatten_batch(tensor: torch.Tensor, shape: CallShape) -> torch.Tensor:
    """``tensor`` (*batch, heads, ...) as (b, heads, ...); copied only where it has no such view."""
    dims = len(shape.batch_shape)
    if dims == 1:
        return tensor
    return tensor.reshape(shape.batch, *tensor.shape[dims:]) if dims else tensor.unsqueeze(0)


def have_flattened_views(*tensors: torch.Tensor) -> bool:
    """Whether all tensors (*batch, heads, n, d) have views (b, heads, n, d)."""
    return all(tensor.dim() <= 4 or _has_flattened_view(tensor) for tensor in tensors)


def _has_flattened_view(tensor: torch.Tensor) -> bool:
    try:
        tensor.view(-1, *tensor.shape[-3:])
    except RuntimeError:
        return False
    return True


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """A clock for stages, and streams for several kernel calls at once."""

    clock: Clock
    streams: KernelStreams | None = None


# The largest element is below 2 to this power after the division: large where that is no danger, to
# keep the small numbers. Elsewhere it is below 1, so that no product overflows.
_WIDE_LARGEST, _PLAIN_LARGEST = 15, 0
# Largest magnitude of an exponent: fp32 holds these powers of two exactly, with room to spare.
_LARGEST_EXPONENT = 120


def exceeds_range_of(gradient: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether dtype ``gradient`` has numbers that are too small or large for dtype ``inputs``."""
    return gradient != inputs and torch.finfo(gradient).tiny < torch.finfo(inputs).tiny


def rescale_upstream(
    grad_out: torch.Tensor, problem: Problem, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``grad_out`` (*batch, heads, n_queries, value_dim) for inputs of a backward's dtype, divided
    if that cannot hold it.

    The host does not wait for the device.

    Args:
        device: the device that computes.

    Returns:
        the gradient, with any strides, and the powers of two that it was divided by, (*batch,
        kv_heads), in the state's dtype on ``device``; None if it was not divided.
    """
    shape = problem.shape
    if not exceeds_range_of(grad_out.dtype, shape.dtype):
        return grad_out, None
    # Rows that are not finite do not count.
    rows = torch.linalg.vector_norm(grad_out, ord=torch.inf, dim=-1)
    rows = rows.nan_to_num_(0.0, posinf=0.0)
    largest = rows.unflatten(-2, (shape.kv_heads, -1)).amax(dim=(-2, -1))
    # 2**(exponent - 1) <= largest < 2**exponent
    exponent = torch.frexp(largest.to(torch.float64)).exponent
    # Some kernels take one as large as fp16 holds: it is divided again for each unit, or meets
    # nothing narrower than fp32, as with dropout.
    wide = problem.kernel.fp32_products or shape.dtype in problem.kernel.scaled_backward
    exponent -= _WIDE_LARGEST if wide else _PLAIN_LARGEST
    exponent = exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    by_query = power_of_two(-exponent.int()).repeat_interleave(shape.queries_per_key_head, dim=-1)
    tensor = torch.empty(grad_out.shape, dtype=shape.dtype, device=grad_out.device)
    torch.mul(grad_out, by_query[..., None, None], out=tensor)
    return tensor, power_of_two(exponent.int()).to(device=device, dtype=shape.state_dtype)


def rescaled_upstream_bytes(gradient: torch.dtype, shape: CallShape, *, here: bool) -> int | None:
    """Bytes that ``rescale_upstream`` allocates on the device that computes, for a gradient that is
    there (``here``) or elsewhere; None if it is not divided."""
    if not exceeds_range_of(gradient, shape.dtype):
        return None
    # The divided copy, and two numbers for each row.
    per_row = shape.value_dim * shape.dtype.itemsize + 2 * gradient.itemsize
    return shape.batch * shape.heads * shape.n_queries * per_row if here else 0


# The state that begins with a sink instead of with no key.
_LSE = "lse"


@dataclass(slots=True)
class Job:
    """One pass of one call with its tensors, as it is given to a route.

    Attributes:
        problem: the pass without its tensors, as routes are asked about it.
        tensors: the tensors it reads, by name: (*batch, heads, n, d); lse is (*batch, heads, n).
            They are on ``device`` or on the host.
        scale: the factor of the scores.
        device: the device that computes.
        bias: what the call's mask adds to the scores; None if it has none.
        sinks: (heads,), on ``device``, of the state's dtype; None if the call has none.
        dropout: which probabilities are dropped; None: none.
        results: the results that exist, by name: given by the caller, or made.
        divisor: what the upstream gradient was divided by (``rescale_upstream``); None: it was not.
        report: filled while it runs; None for a call that has no plan.
        progress: called with units done, units in all, and the pass's name.
    """

    problem: Problem
    tensors: dict[str, torch.Tensor]
    scale: float
    device: torch.device
    bias: BiasView | None = None
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None
    results: dict[str, torch.Tensor] = field(default_factory=dict)
    divisor: torch.Tensor | None = None
    report: PassReport | None = None
    progress: Progress | None = None

    @property
    def shape(self) -> CallShape:
        """The call's sizes."""
        return self.problem.shape

    @property
    def kernel(self) -> InnerKernel:
        """The inner kernel."""
        return self.problem.kernel

    @property
    def spec(self) -> PassSpec:
        """Which pass."""
        return self.problem.spec

    def factor(self, group: Group, axis: Axis) -> torch.Tensor | None:
        """The factor of a head group's finished rows, (entries, heads, 1, 1); None is 1."""
        if self.divisor is None:
            return None
        found = torch.stack([self.divisor[entry][group.key_heads] for entry in group.entries])
        if axis == "query":
            found = found.repeat_interleave(group.queries_per_key_head, dim=-1)
        return found[:, :, None, None]

    def read(self, item: InputSpec, group: Group, copied: bool = True) -> torch.Tensor:
        """An input's part for a head group of one batch entry, (1, heads, ...). It is copied if
        operators cannot read it otherwise and it is ``copied``."""
        part = group_part(self.tensors[item.name], group, item.axis)
        if not (copied and item.may_be_unreadable):
            return part
        return as_kernel_readable(part, self.shape.dtype)

    def dtype_of(self, state: StateSpec) -> torch.dtype:
        """The dtype of the result of ``state``."""
        return self.shape.state_dtype if state.over is None else self.problem.place.result_dtype

    def make_results(self, home: torch.device | None = None) -> tuple[torch.Tensor, ...]:
        """All results, in the order of the pass's states; allocates those that do not exist.

        Args:
            home: where to allocate results that are their own state; None is where the inputs are.

        Raises:
            OutOfMemoryError: host memory cannot hold them.
        """
        for state in self.spec.states:
            if state.name not in self.results:
                here = self.tensors["query"].device
                where = here if state.over is not None or home is None else home
                shape, dtype = state.shape(self.shape), self.dtype_of(state)
                self.results[state.name] = empty_result(
                    shape, dtype, where, state.words, self.device, self._input_of(state)
                )
        return tuple(self.results[state.name] for state in self.spec.states)

    def _input_of(self, state: StateSpec) -> torch.Tensor | None:
        """The input whose layout the result of ``state`` has."""
        if state.name == _LSE:
            return None
        return self.tensors[state.name if self.spec.backward else "query"]

    def store_results(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Take a kernel's own tensors (b, heads, ...) of the whole call as results; copies those
        that the caller gave tensors for, or that have another dtype."""
        shape, results, states = self.problem.shape, self.results, self.problem.spec.states
        for state, part in zip(states, parts, strict=True):
            result = part if len(shape.batch_shape) == 1 else part.reshape(state.shape(shape))
            given, dtype = results.get(state.name), self.dtype_of(state)
            if given is not None:
                result = given.copy_(result)
            results[state.name] = result if result.dtype == dtype else result.to(dtype)
        return tuple([results[state.name] for state in states])

    def targets(self, group: Group) -> list[torch.Tensor]:
        """A head group's part of each result, as views; of one batch entry."""
        states = zip(self.spec.states, self.make_results(), strict=True)
        return [group_part(result, group, state.axis) for state, result in states]

    def fill(self, state: StateSpec, group: Group) -> float | torch.Tensor:
        """What rows of ``state`` begin with: a number, or one for each head of the group,
        (h, 1, 1)."""
        if self.sinks is None or state.name != _LSE:
            return state.fill
        return self.sinks[group.query_heads][:, None, None]

    def count_repeats(self, times: int) -> None:
        """Add ``times`` to the report's count of repeated units."""
        if self.report is not None:
            self.report.repeated_units += times

    def report_progress(self, done: int, total: int) -> None:
        """Report progress, in units."""
        if self.progress is not None:
            self.progress(done, total, self.spec.name)

    def dropout_of(self, group: Group) -> Dropout | None:
        """The dropout of a head group, numbered in the whole call."""
        if self.dropout is None:
            return None
        return self.dropout.at(group.query_heads.start, group.entry_numbers.start)

    def bias_of(self, group: Group, task: Task) -> Bias:
        """The function that gives the additive mask of each rectangle of ``task``."""
        if self.bias is None:
            return no_bias
        return self.bias.bias(group, task, self.shape.bias_dtype, self.device)

    def task(
        self,
        limits: tuple[int, int],
        group: Group,
        tools: Tools,
        task: Task,
        rectangles: Sequence[Rectangle],
        three: Sequence[torch.Tensor] | None = None,
    ) -> TaskTensors:
        """What a kernel is given to compute ``task``.

        Args:
            limits: most queries and keys of a rectangle.
            rectangles: what to compute, in positions of the rows of ``three``.
            three: query, key and value, (b, heads, n, d) each; None: the inputs themselves, for a
                head group of one batch entry.
        """
        if three is None:
            three = [self.read(item, group) for item in self.spec.inputs[:3]]
        return TaskTensors(
            task=task,
            rectangles=rectangles,
            query=three[0],
            key=three[1],
            value=three[2],
            scale=self.scale,
            is_causal=self.shape.is_causal,
            bias=self.bias_of(group, task),
            max_queries=limits[0],
            max_keys=limits[1],
            timed=tools.clock.timed,
            streams=tools.streams,
            first_head=group.query_heads.start,
            entries=tuple(group.entry_numbers),
            dropout=self.dropout_of(group),
        )
