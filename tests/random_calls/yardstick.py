"""torch's own attention of the same inputs in the same dtype: how far off it is.

A cut call is as good as the kernel it wraps, so what torch's own call loses, with head
dimensions and heads as they are or brought to what its fused kernels take, is no fault
of ours. fp16 gradients of which the largest have to be divided lest they overflow are
held against torch's, divided as much. Where few numbers are at stake torch may be
lucky: then its neighbours are asked too, the same case with values and upstream
gradients some per cent apart.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import helpers.equations as equations
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from quorum_attention.decomposition import Decomposition
from random_calls.call import GRADIENTS
from random_calls.case import Case, Scores
from random_calls.reference import BoundedResult, Reference, place
from random_calls.tensors import DTYPES, CallInputs

_NEIGHBOURS = 8
# Others who are asked; after them cuDNN.
_OTHERS = 2 + _NEIGHBOURS
_QUICK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Kernels of vendors, whose outputs of parts are of the inputs' dtype. What else there
# is merges in fp32.
_ROUNDING = ("cpu", "fa4", "cudnn", "flash", "efficient")
Results = dict[str, torch.Tensor]


# How a forward was cut: its kernel's name and its levels.
Cut = tuple[str, tuple[int, ...]]


def output_of_parts(reference: Reference, cut: Cut) -> torch.Tensor:
    """The output in float64, but that those of the very parts of a call's keys are
    rounded to 16 bits before they are merged, as docs/accuracy.md says: sum_p w_p
    round(O_p), rounded again.

    A backward forms D = rowsum(dO * O) of it. In a row of nearly one key dP - D is
    little but those roundings, and torch's error of the uncut call says nothing of the
    second.
    """
    case = reference.case
    p = reference.exact.p
    value = reference.exact.value
    orders = case.orders
    # If the planner has chosen, the edges of chunks may be others: as many, and as
    # large.
    is_planned = orders.how == "plan"
    layout = orders.layout if is_planned else "aligned"
    tile = orders.tile if is_planned else 128
    n_tokens = max(case.n_queries, case.n_keys)
    rounded = torch.zeros_like(reference.exact.out)
    unrounded = torch.zeros_like(reference.exact.out)
    for task in Decomposition(n_tokens, cut[1], layout, tile).tasks():
        runs = [torch.arange(run.start, run.stop) for run in task.runs]
        tokens = torch.cat(runs or [torch.empty(0)]).long().to(p.device)
        for rectangle in task.rectangles(case.is_causal, case.n_queries, case.n_keys):
            rows = tokens[rectangle.query_start : rectangle.query_stop]
            keys = tokens[rectangle.key_start : rectangle.key_stop]
            part = p[..., rows, :][..., keys]
            share = part.sum(-1, keepdim=True)
            out = (part @ value[..., keys, :]) / share.masked_fill(share == 0, 1.0)
            rounded[..., rows, :] += share * out.to(reference.dtype).double()
            unrounded[..., rows, :] += share * out
    # If these are not all pairs, what they lack is no rounding, and allows for nothing.
    if unrounded.numel():
        lack = float((unrounded - reference.exact.out).abs().max())
        largest = float(value.abs().max())
        assert lack <= 1e-9 * (1 + largest), "the parts are not the whole call"
    return rounded.to(reference.dtype).double()


class Yardstick:
    """torch's results and errors for one case; computed when they are asked for.

    ``cut``: says how the call was cut, if it is known; asked last.
    """

    def __init__(
        self,
        case: Case,
        inputs: CallInputs,
        dtypes: tuple[torch.dtype, torch.dtype],
        compute: torch.device | None = None,
        cut: Callable[[], Cut | None] | None = None,
    ) -> None:
        # torch's gradients are those of the output alone.
        inputs = replace(
            inputs if compute is None else inputs.on(compute), grad_lse=None
        )
        self.case, self.inputs, self.dtypes = case, inputs, dtypes
        self.where = place(case, inputs.query.device)
        self._cut = cut
        self._errors: list[Results] = []

    def errors(self, name: str, wanted: BoundedResult) -> Iterator[torch.Tensor]:
        """Torch's largest error by head, broadcastable to the result: of the call, and
        then never smaller, what it comes to with another path and with neighbours."""
        largest = wanted.exact.new_zeros(())
        rules = self.case.rules
        unlike = rules is not None and (rules.softcap is not None or rules.sinks)
        unlike = unlike or self.case.scores != Scores() or bool(self.case.dropout)
        if unlike or rules is not None or name == "grad_mask":
            # torch has no such call, or another kernel for it, or drops others: what a
            # rounded output may cost by itself.
            largest = wanted.loose_bound
            yield largest
        if unlike:
            return
        for number in range(_OTHERS + self.inputs.query.is_cuda):
            while len(self._errors) <= number:
                self._errors.append(self._more(len(self._errors)))
            found = self._errors[number].get(name)
            if found is not None:
                largest = torch.maximum(largest, found)
                yield largest
        cut = None if self._cut is None or name not in GRADIENTS else self._cut()
        narrow = self.case.dtype in ("float16", "bfloat16")
        narrow = narrow and rules is None
        # Parts are rounded to 16 bits.
        if cut is not None and cut[1] and narrow and cut[0] in _ROUNDING:
            yield torch.maximum(largest, self._of_parts(name, wanted, cut))

    def _of_parts(self, name: str, wanted: BoundedResult, cut: Cut) -> torch.Tensor:
        reference = Reference(self.case, self.inputs, self.where)
        exact = reference.gradients_with_delta_of(reference.exact.out)[name]
        out_of_parts = output_of_parts(reference, cut)
        rounded = reference.gradients_with_delta_of(out_of_parts)[name]
        return _head_errors(wanted.exact + (rounded - exact), wanted)

    def _more(self, number: int) -> Results:
        own = number in (0, 1, _OTHERS)
        inputs = self.inputs if own else neighbour(self.case, self.inputs, number)
        reference = Reference(self.case, inputs, self.where)
        wanted = reference.forward(self.dtypes[0])
        if self.case.route != "forward":
            wanted |= reference.backward(self.dtypes[1], self.dtypes[0])
        errors: Results = {}
        for results in _others(self.case, inputs, number):
            for name, found in results.items():
                off = _head_errors(found, wanted[name])
                errors[name] = (
                    torch.maximum(errors[name], off) if name in errors else off
                )
        return errors


def _head_errors(result: torch.Tensor, expected: BoundedResult) -> torch.Tensor:
    """The largest error of each head of a result of torch's.

    If an error is not finite, or more than such arithmetic can account for, torch is
    wrong itself. Then the error is the loose bound.
    """
    is_finite = expected.exact.isfinite()
    errors = (
        (result.to(expected.exact) - expected.exact).abs().masked_fill(~is_finite, 0.0)
    )
    errors = torch.where(errors.isnan(), torch.inf, errors)
    # If a mask of the lowest numbers leaves no bound, there is nothing to hold torch
    # to.
    loose = torch.where(expected.loose_bound.isnan(), torch.inf, expected.loose_bound)
    errors = torch.minimum(errors, loose).nan_to_num(nan=0.0, posinf=0.0)
    return errors.amax((-2, -1), keepdim=True) if errors.numel() else errors


def neighbour(case: Case, inputs: CallInputs, number: int) -> CallInputs:
    """The same with values and upstream gradients some per cent apart, a way for every
    number."""
    generator = torch.Generator().manual_seed(case.seed * 100 + number)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        factors = 1 + 0.1 * (torch.rand(tensor.shape, generator=generator) - 0.5)
        largest = torch.finfo(tensor.dtype).max
        products = tensor.double() * factors.to(tensor.device)
        return products.clamp(-largest, largest).to(tensor.dtype)

    return replace(inputs, value=moved(inputs.value), grad_out=moved(inputs.grad_out))


def _others(case: Case, inputs: CallInputs, number: int) -> Iterator[Results]:
    """What others make of a case: what it costs little to ask first."""
    ask = partial(_call, case, inputs)
    if number == _OTHERS:
        yield ask(_fused, by=[SDPBackend.CUDNN_ATTENTION])
        return
    if number != 1:
        yield ask(_as_it_is)
        if case.kernel == "fa4":
            yield ask(_fa4)
    if number != 0:
        yield ask(_fused)
        if inputs.query.is_cuda:
            # The same operator: what it rounds, how small its scale may be.
            yield ask(_fused, by=[SDPBackend.EFFICIENT_ATTENTION])
        divided = (
            _divided(inputs)
            if case.dtype == "float16" and case.route != "forward"
            else 0
        )
        if divided > 0:
            yield ask(_fused, divided=divided)


def _call(
    case: Case,
    inputs: CallInputs,
    attend: Callable[..., torch.Tensor],
    *,
    divided: int = 0,
    by: Sequence[SDPBackend] = _QUICK,
) -> Results:
    """Output and gradients, or nothing where such a call is not taken.

    Args:
        divided: with grad_out by so many powers of two, which is undone.
        by: on a GPU, by these kernels of torch's; default all but cuDNN's, which takes
            some tenths of a second for each shape.
    """
    has_backward = case.route != "forward"
    dense = torch.contiguous_format
    leaves = [
        # Rows between words are more than torch's own kernels for GPUs can take.
        tensor.detach().clone(memory_format=dense).requires_grad_(has_backward)
        for tensor in inputs.qkv
    ]
    backends = (
        sdpa_kernel(list(by)) if inputs.query.is_cuda else contextlib.nullcontext()
    )
    try:
        with warnings.catch_warnings(), backends:
            warnings.simplefilter("ignore")
            out = attend(case, inputs, *leaves)
            out = out.reshape(inputs.grad_out.shape).to(inputs.query.device)
        results = {"out": out.detach()}
        if not has_backward:
            return results
        upstream = (inputs.grad_out * 2.0**-divided).to(DTYPES[case.dtype])
        gradients = torch.autograd.grad(
            out, leaves, upstream.clone(memory_format=dense)
        )
        if divided:
            gradients = [gradient.double() * 2.0**divided for gradient in gradients]
        return results | dict(zip(GRADIENTS, gradients, strict=True))
    except Exception:  # widths that it does not take, or no such library
        return {}


def _as_it_is(case: Case, inputs: CallInputs, *three: torch.Tensor) -> torch.Tensor:
    """``scaled_dot_product_attention`` as it is called by default."""
    call = {"scale": _scale(case), "enable_gqa": case.heads != case.kv_heads}
    mask, is_causal = _mask(case, inputs)
    return scaled_dot_product_attention(*three, mask, 0.0, is_causal, **call)


def _fused(
    case: Case, inputs: CallInputs, query: torch.Tensor, *two: torch.Tensor
) -> torch.Tensor:
    """With values as wide as queries, as many key heads, four dimensions and dense
    rows, as its fused kernels ask for."""
    shared = case.heads // case.kv_heads if case.kv_heads else 1
    # Fused kernels take whole words of 16 bytes.
    wide = -(-max(case.head_dim, case.value_dim) // 8) * 8
    three = (
        pad(t, (0, wide - t.shape[-1])).reshape(-1, *t.shape[-3:-1], wide).contiguous()
        for t in (query, *(t.repeat_interleave(shared, -3) for t in two))
    )
    mask, is_causal = _mask(case, inputs)
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], case.n_keys)
        mask = mask.reshape(-1, *mask.shape[-3:])
    out = scaled_dot_product_attention(*three, mask, 0.0, is_causal, scale=_scale(case))
    return out[..., : case.value_dim]


def _fa4(case: Case, inputs: CallInputs, *three: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4's own call."""
    from flash_attn.cute import flash_attn_func

    scale = _scale(case)
    if not scale or 0 in three[0].shape or 0 in three[1].shape:
        raise NotImplementedError
    q, k, v = (t.reshape(-1, *t.shape[-3:]).transpose(1, 2).cuda() for t in three)
    # It counts diagonals from the last query and the last key.
    latest = case.n_queries - case.n_keys if case.is_causal else None
    out = flash_attn_func(
        q * math.copysign(1.0, scale), k, v, softmax_scale=abs(scale), window_size=(None, latest),
        return_lse=True,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


def _scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _divided(inputs: CallInputs) -> int:
    """By which power of two an fp16 gradient has to be divided, lest P dO or dS
    overflow."""
    norms = (
        t.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
        for t in (inputs.grad_out, inputs.value)
    )
    gradient, value = (float(t.max()) if t.numel() else 0.0 for t in norms)
    largest = gradient * max(2 * value, 2.0)
    return math.ceil(math.log2(largest)) - 15 if largest > 0 else 0


def _mask(case: Case, inputs: CallInputs) -> tuple[torch.Tensor | None, bool]:
    """Mask and causality as torch takes them: one or the other."""
    mask, is_causal = inputs.mask, case.is_causal
    if mask is None and case.rules is None:
        return None, is_causal
    if mask is not None and mask.dtype != torch.bool:
        # The narrowest dtype that torch takes beside the inputs and that holds the
        # mask.
        dtype = torch.promote_types(mask.dtype, DTYPES[case.dtype])
        mask = mask.to(torch.float32 if case.dtype != "float64" else dtype)
        mask = mask.to(DTYPES[case.dtype]) if dtype == DTYPES[case.dtype] else mask
    if is_causal or case.rules is not None:
        mask = _with_rules(case, inputs, mask)
    if mask is not None and mask.is_cuda:
        mask = _in_whole_words(mask, case.n_keys)
    return mask, False


def _with_rules(
    case: Case, inputs: CallInputs, mask: torch.Tensor | None
) -> torch.Tensor:
    """The mask with what the rules and ``is_causal`` keep, (..., n, m)."""
    rows, columns = case.n_queries, case.n_keys
    kept = torch.ones(rows, columns, dtype=torch.bool)
    if case.is_causal:
        kept = kept.tril()
    if inputs.rules is not None:
        sizes = math.prod(case.batch), case.heads, rows, columns
        rules = equations.kept_by(inputs.rules, *sizes) & kept
        kept = rules.reshape(*case.batch, *sizes[1:])
    kept = kept.to(inputs.query.device)
    if mask is None:
        return kept
    if mask.dtype == torch.bool:
        return mask & kept
    return torch.where(
        kept, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=mask.device)
    )


def _in_whole_words(mask: torch.Tensor, n_keys: int) -> torch.Tensor:
    """Rows of masks between words are more than torch's own kernels for GPUs can take,
    too."""
    rows = torch.empty(
        (*mask.shape[:-1], -(-n_keys // 16) * 16), dtype=mask.dtype, device="cuda"
    )
    rows[..., :n_keys] = mask
    return rows[..., :n_keys]
