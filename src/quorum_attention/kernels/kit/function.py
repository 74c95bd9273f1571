"""Any function that returns an output and its log-sum-exp, as an inner kernel.

Results over disjoint sets of keys can be merged if each comes with its lse (paper,
section 3). So a function that returns (out, lse) for a rectangle can be called for one
rectangle after another. Its gradient needs no second function: with the whole row's O
and lse, a rectangle has the weight ``w = exp(lse_i - lse)`` in the row, and

    O = sum_i w_i O_i   =>   dL/dO_i = w_i dO,   dL/dlse_i = w_i (dO . (O_i - O)),

which autograd propagates through the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.argument_checks import check_callable, shown, switch
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.operator_call import OutLse, Saved, Three
from quorum_attention.kernels.task_calls import CallsKernel, TaskCall
from quorum_attention.kernels.task_tensors import Indices, TaskTensors
from quorum_attention.kernels.tensors import NamedTensors, row_blocks
from quorum_attention.keywords import helps_with_names
from quorum_attention.plain_types import Keywords

LseFunction = Callable[..., OutLse]
BackwardFunction = Callable[..., "Three"]
WorkspaceBound = Callable[[CallShape, Extent], int]

_OPTIONAL = ("query_positions", "key_positions", "head_indices", "batch_indices")


class FunctionKernel(CallsKernel):
    """An inner kernel from a function; pass it as ``kernel=``, or register it.

    Args:
        function: ``function(query, key, value, *, is_causal, scale, ...) -> (out,
            lse)`` for some queries and some keys of the call. With ``is_causal`` these
            are a square on the diagonal, and a query sees no later key. query (b, h,
            lq, d), key (b, h, lk, d), value (b, h, lk, dv) are strided views. out (b,
            h, lq, dv) is normalised; lse (b, h, lq) is the natural log of the sum of
            exponentials, -inf (with any out) in rows without keys. If it has parameters
            with these names, it also gets ``query_positions`` (lq,), ``key_positions``
            (lk,), ``head_indices`` (h,) of the query heads and ``batch_indices`` (b,):
            int64, counted in the whole call. The function must not change while the
            kernel lives. It runs without autocast.
        name: for messages and reports; the default is the function's name.
        backward: ``backward(grad_out, query, key, value, out, lse, *, is_causal, scale,
            ...)`` -> gradients of query, key and value. out and lse are those of whole
            rows (as in FlashAttention). By default autograd computes gradients through
            ``function``, whose out and lse must then be differentiable.
        grouped: whether the function takes fewer key heads than query heads.
        workspace: ``workspace(call, extent)`` -> upper bound of the bytes that a call
            allocates. Default: four score matrices in fp32, enough for a function that
            materialises scores.
        positive_scale: True if the function is right only for a scale above 0, as
            torch's operator for CPUs is in causal calls. Calls with other scales are
            then refused.

    Raises:
        TypeError: ``function`` is not callable, or lacks ``is_causal`` or ``scale``.

    Examples:
        >>> def mine(query, key, value, *, is_causal, scale):
        ...     scores = scale * (query @ key.mT)
        ...     if is_causal:
        ...         later = torch.ones_like(scores).triu(1).bool()
        ...         scores = scores.masked_fill(later, -torch.inf)
        ...     lse = torch.logsumexp(scores, -1)
        ...     return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
        >>> q = torch.randn(1, 2, 300, 16, requires_grad=True)
        >>> out = qa.attention(q, q, q, kernel=qa.from_lse_function(mine), depth=1)
        >>> out.sum().backward()
    """

    own_attention = True

    @helps_with_names
    def __init__(
        self,
        function: LseFunction,
        *,
        name: str | None = None,
        backward: BackwardFunction | None = None,
        grouped: bool = False,
        workspace: WorkspaceBound | None = None,
        positive_scale: bool = False,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        check_callable(backward, "backward")
        check_callable(workspace, "workspace")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, got {shown(name)}")
        class_name = type(function).__name__
        self.name = name or str(getattr(function, "__name__", class_name))
        self.function = function
        self.explicit_backward = backward
        self.workspace = workspace
        self.grouped = switch(grouped, "grouped")
        self.positive_scale = switch(positive_scale, "positive_scale")
        self._optional_names = _optional_parameters(function, "function")
        self._backward_optional_names: tuple[str, ...] = ()
        if backward is not None:
            self._backward_optional_names = _optional_parameters(backward, "backward")
        self.position_free = not (self._optional_names or self._backward_optional_names)

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``Kernel``."""
        if self.explicit_backward is None:
            return (self.function,)
        return (self.function, self.explicit_backward)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """See ``Kernel``."""
        results: list[torch.Tensor] = []
        for heads in self._heads(query, key):
            numbers = _optional_arguments(self._optional_names, at, heads)
            results += self._called(
                query[:, heads],
                key,
                value,
                is_causal=False,
                scale=1.0,
                **numbers,
            )
        return results

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        if shape.bias is not None:
            return (
                "it takes no attention mask: let the function itself apply it, by "
                "positions"
            )
        if self.positive_scale and not shape.positive_scale:
            return "its function is for a scale above 0"
        return None

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return (self.workspace or quadratic_workspace)(
            shape, extent
        ) + MERGE_WORKSPACE_BYTES

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        # Autograd saves the forward's tensors; the gradients need as much.
        workspace = self.workspace or quadratic_workspace
        return 2 * workspace(shape, extent) + MERGE_WORKSPACE_BYTES

    def task_calls(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[tuple[TaskCall]]:
        """Yield a call for each rectangle and each of the heads that one call takes."""
        names = self._optional_names
        if backward and self.explicit_backward is not None:
            names = self._backward_optional_names
        for rectangle in task.rectangles:
            at = task.indices(rectangle) if names else None
            for heads in self._heads(task.query, task.key):
                numbers = _optional_arguments(names, at, heads)
                yield (self._task_call(task, rectangle, heads, numbers),)

    def _task_call(
        self,
        task: TaskTensors,
        rectangle: Rectangle,
        heads: slice,
        numbers: Keywords,
    ) -> TaskCall:
        options = {"is_causal": rectangle.causal, "scale": task.scale, **numbers}
        query_rows = slice(rectangle.query_start, rectangle.query_stop)
        key_rows = slice(rectangle.key_start, rectangle.key_stop)
        pick_queries = itemgetter((slice(None), heads, query_rows))
        pick_keys = itemgetter((slice(None), slice(None), key_rows))
        inputs = (pick_queries(task.query), pick_keys(task.key), pick_keys(task.value))
        return TaskCall(
            rows=pick_queries,
            keys=pick_keys,
            forward=partial(self._forward, *inputs, **options),
            backward=partial(self._gradients, inputs, options),
        )

    def _forward(self, *inputs: torch.Tensor, **options: Any) -> OutLse:
        with torch.no_grad():
            out, lse = self._called(*inputs, **options)
        has_no_key = (lse == -torch.inf).unsqueeze(-1)
        return out.masked_fill(has_no_key, 0.0), lse

    def _gradients(self, inputs: Three, options: Keywords, saved: Saved) -> Three:
        if self.explicit_backward is None:
            recorded = {name: recordable(value) for name, value in options.items()}
            return gradients_by_autograd(
                partial(self._called, **recorded), inputs, saved
            )
        return self.explicit_backward(
            saved.grad_out,
            *inputs,
            saved.out,
            saved.lse,
            **options,
        )

    def _called(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> OutLse:
        """Call the function, and check what it returns."""
        results = self.function(query, key, value, **options)
        if not isinstance(results, tuple) or len(results) != 2:
            raise TypeError(
                f"kernel {self.name!r} must return (out, lse), got {type(results)}"
            )
        out, lse = results
        rows = tuple(query.shape[:3])
        self._check_result(
            "out",
            out,
            (*rows, value.shape[-1]),
        )
        self._check_result("lse", lse, rows)
        return out, lse

    def _check_result(
        self, result_name: str, result: object, shape: tuple[int, ...]
    ) -> None:
        must_return = f"kernel {self.name!r} must return"
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"{must_return} a tensor as {result_name}, got {shown(result)}"
            )
        if result.shape != shape:
            raise ValueError(
                f"{must_return} {result_name} of shape {shape}, got "
                f"{tuple(result.shape)}"
            )


from_lse_function = FunctionKernel


def gradients_by_autograd(
    run: Callable[..., OutLse],
    inputs: Sequence[torch.Tensor],
    saved: Saved,
) -> Three:
    """Gradients of query, key and value by autograd through another forward of a part.

    Args:
        run: ``run(query, key, value) -> (out, lse)`` of the part.
        inputs: query, key and value of the part.
        saved: the results of the whole rows.

    Raises:
        TypeError: ``run`` has no gradient.
    """
    # Gradients have to be recorded here, also if the caller has turned that off.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [recordable(tensor).detach().requires_grad_() for tensor in inputs]
        part_out, part_lse = run(*leaves)
        if not (part_out.requires_grad and part_lse.requires_grad):
            which = "an lse" if part_out.requires_grad else "an out"
            raise TypeError(
                f"the kernel's function returns {which} without a gradient: both must "
                "be differentiable, or give backward="
            )
        grads = torch.autograd.grad(
            (part_out, part_lse),
            leaves,
            upstream_of(part_out, part_lse, saved),
            allow_unused=True,
        )
    query, key, value = (
        torch.zeros_like(leaf) if grad is None else grad
        for grad, leaf in zip(grads, leaves, strict=True)
    )
    return query, key, value


def recordable(value: Any) -> Any:
    """A copy of a tensor of inference mode, which autograd refuses; anything else as it
    is."""
    is_refused = isinstance(value, torch.Tensor) and value.is_inference()
    return value.clone() if is_refused else value


def upstream_of(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    saved: Saved,
) -> OutLse:
    """Gradients with respect to a part's out and lse (module docstring), in their
    dtypes.

    Args:
        part_out, part_lse: (b, h, rows, dv) and (b, h, rows).
        saved: the results of the whole rows, of the same shapes.
    """
    dtype = saved.lse.dtype
    grad_part_out = torch.empty_like(part_out)
    grad_part_lse = torch.empty_like(part_lse)
    batch, heads, rows, width = part_out.shape
    row_bytes = max(1, width) * dtype.itemsize
    with torch.no_grad():
        # In blocks, because everything is converted to the dtype of lse.
        for block in row_blocks(batch, heads, rows, row_bytes):
            block_out = part_out[block]
            block_lse = part_lse[block]
            has_no_key = block_lse == -torch.inf
            # A row without keys in this part has no weight; -inf - -inf would make it
            # NaN.
            weight = torch.exp(block_lse.to(dtype) - saved.lse[block])
            weight = weight.masked_fill_(has_no_key, 0.0)
            upstream = saved.grad_out[block].to(dtype) * weight.unsqueeze(-1)
            row_out = saved.out[block]
            difference = block_out.to(dtype) - row_out.to(dtype)
            # Where a part is the whole row and its output, rounded, is the row's, the
            # difference is rounding alone. It would be a gradient of scores that have
            # none.
            has_lse_of_row = block_lse.to(dtype) == saved.lse[block]
            is_row = block_out.to(row_out.dtype) == row_out
            is_row &= has_lse_of_row.unsqueeze(-1)
            is_zero = is_row.logical_or_(has_no_key.unsqueeze(-1))
            difference.masked_fill_(is_zero, 0.0)
            grad_part_out[block] = upstream.to(part_out.dtype)
            products = upstream * difference
            grad_part_lse[block] = products.sum(dim=-1).to(part_lse.dtype)
    return grad_part_out, grad_part_lse


def quadratic_workspace(shape: CallShape, extent: Extent) -> int:
    """Bytes of four score matrices in fp32 (fp64 for fp64 inputs), and of copies of the
    rows."""
    item = max(4, shape.dtype.itemsize)
    n_pairs = extent.rows * extent.max_keys
    n_rows = extent.lanes * (extent.max_queries + extent.max_keys)
    score_bytes = 4 * n_pairs * item
    row_bytes = 2 * n_rows * (shape.kv_width + 2) * item
    return score_bytes + row_bytes


def _optional_parameters(
    function: Callable[..., Any], argument_name: str
) -> tuple[str, ...]:
    """The names in ``_OPTIONAL`` that a function has as parameters.

    Raises:
        TypeError: it lacks a parameter that every call gives.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return _OPTIONAL
    for required in ("is_causal", "scale"):
        if required not in parameters:
            raise TypeError(
                f"{argument_name} {shown(function)} must have a parameter "
                f"{required!r}: it is called as f(query, key, value, *, is_causal, "
                f"scale), and has {list(parameters)}"
            )
    return tuple(name for name in _OPTIONAL if name in parameters)


def _optional_arguments(
    names: tuple[str, ...], at: Indices | None, heads: slice
) -> NamedTensors:
    """The optional arguments of these names, for some pairs of some heads."""
    if at is None:
        return {}
    numbers = {
        "query_positions": at.queries,
        "key_positions": at.keys,
        "head_indices": at.heads[heads],
        "batch_indices": at.entries,
    }
    return {name: numbers[name] for name in names}
