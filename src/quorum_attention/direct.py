"""Calls that are one kernel call, made again without being checked, decided or planned.

To check a call and to decide how it runs takes the host longer than many calls take the device. So
a call that asks for attention and nothing more is looked up first, by all that its checks and its
decision depend on (``cache_key``). What is remembered is the kernel of the call, and whether its
gradients are one kernel call too. Where memory runs out the call is decided as any other, by what
is free then. Nothing is remembered that holds a tensor, or a kernel that its user may let go.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from quorum_attention.autograd import RESULTS, Quick, attend, gradients, named_derivative
from quorum_attention.call.gradients import Given
from quorum_attention.call.places import place_after
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.settings import current
from quorum_attention.call.transforms import refuse_batched
from quorum_attention.execution.call import MaskView, operand, results_are_dense, rows_overlap
from quorum_attention.execution.case import corrected_bytes
from quorum_attention.execution.device.lookup import BACKENDS, GPU, backend_of, best_device
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.execution.routes.over_inputs import (
    Whole,
    materialised,
    materialises,
    without_empty_rows,
)
from quorum_attention.execution.scaling import scales
from quorum_attention.kernels.protocol import Call, InnerKernel, Saved
from quorum_attention.kernels.registry import get_kernel, kernels, registrations
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.passes import as_own, decide_backward, decide_forward, is_trivial
from quorum_attention.planner.calibration import rates_known
from quorum_attention.planner.decide import Decision, Problem, decide

# By names of this file: to look them up in torch would take longer than the shortest calls.
_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
# Included while there is a mode before dispatch.
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_included = torch._C._dispatch_tls_is_dispatch_key_included
_autocast, _records = torch.is_autocast_enabled, torch.is_grad_enabled
_deterministic, _strided = torch._C._get_deterministic_algorithms, torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORD = 16
# Whether this torch could find a GPU, which then computes what lies in host memory.
_ANY_GPU = torch.version.cuda is not None
# Calls that are remembered; when there are more, all are forgotten. (Under a mask each keeps its
# kernel's tables in page-locked memory, 0.4 MB for 262,144 tokens.)
_MOST = 128
# Most bytes of an additive copy of a boolean mask that a graph of torch's is to keep.
_MOST_BIAS = 1 << 20


# --- What a call is looked up by ----------------------------------------------------------------


def cache_key(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Hashable | None:
    """What a call without other options is looked up by; None if it is none that is remembered.

    Calls of one key differ in their numbers only, and on a CPU in how many keys they have where no
    gradients are recorded: a model that decodes has another number at every call, and decisions
    round it up (``planner/small.py``).
    """
    for tensor in (query, key, value):
        # A tensor of another kind may not even have sizes.
        if type(tensor) not in _PLAIN or tensor.layout is not _strided or tensor.is_nested:
            return None
        if tensor.dim() != 4 or tensor.is_neg():
            return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if scale is not None and type(scale) is not float:
        return None
    kind = query.device.type
    backend = BACKENDS.get(kind)
    # Before sizes are looked at: under a trace they may be tensors.
    if backend is None or _is_unusual(kind):
        return None
    records = _records() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if backend.own_memory:
        own = _on_a_gpu(query, key, value, attn_mask)
    else:
        mask = None if attn_mask is None else _plain_mask(attn_mask, query.device)
        if attn_mask is not None and mask is None:
            return None
        own = _on_a_cpu(query, key, value, mask, is_causal or mask is not None or records)
    if own is None:
        return None
    return (
        own, query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        is_causal, scale, enable_gqa, records, backend,
        _deterministic(), registrations(), rates_known(),
    )  # fmt: skip


def _plain_mask(mask: Any, device: torch.device) -> Hashable | None:
    """A mask that is a tensor on ``device`` without a gradient, by what is looked at of it."""
    if type(mask) not in _PLAIN or mask.layout is not _strided or mask.is_nested:
        return None
    if mask.device != device or mask.requires_grad or mask.is_neg():
        return None
    return (mask.shape, mask.dtype)


def _on_a_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Hashable | None,
    exact: bool,
) -> Hashable | None:
    n_keys = key.shape[2]
    if n_keys == 0 or value.shape[2] != n_keys or (_ANY_GPU and BACKENDS[GPU].is_here()):
        return None
    steps = query.stride()
    if steps[3] != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    if steps.count(1) > 1 and not results_are_dense(query):
        return None
    if query.dtype.itemsize == 2 and any(rows_overlap(t) for t in (query, key, value)):
        return None
    keys = n_keys if exact else (n_keys - 1).bit_length()
    others = (*key.shape[:2], key.shape[3], *value.shape[:2], value.shape[3])
    return (query.shape, others, keys, mask)


def _on_a_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any
) -> Hashable | None:
    mask = () if attn_mask is None else _described(attn_mask)
    if mask is None:
        return None
    try:
        places = query.data_ptr() % _WORD, key.data_ptr() % _WORD, value.data_ptr() % _WORD
    except RuntimeError:
        # It has no memory of its own: it belongs to a transformation, even to one that is over.
        return None
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        places, best_device(), mask,
    )  # fmt: skip


def _described(mask: Any) -> Hashable | None:
    """A ``Mask`` without tensors, functions and other masks, in numbers; None for others."""
    if type(mask) is not Mask or mask.either or mask.every:
        return None
    tensors = (mask.documents, mask.key_lengths, mask.key_padding, mask.bias, mask.sinks)
    if mask.keeps is not None or any(tensor is not None for tensor in tensors):
        return None
    for number in (mask.offset, mask.chunk):
        if number is not None and type(number) is not int:
            return None
    if mask.softcap is not None and type(mask.softcap) is not float:
        return None
    return (mask.causal, mask.offset, mask.sides, mask.chunk, mask.softcap)


def _is_unusual(kind: str) -> bool:
    """Whether anything is active under which a call is not what its arguments say: settings, a
    checkpoint that keeps results, a trace or a mode, a transformation, forward-mode, autocast."""
    return (
        current() is not None
        or RESULTS.get() is not None
        or _modes() > 0
        or _included(_PRE_DISPATCH)
        or _tracing()
        or _is_transformed()
        or _autocast(kind)
    )


def _is_transformed() -> bool:
    """Whether a transformation of torch.func or forward-mode is active."""
    return bool(_transforms() or _forward_ad._current_level >= 0)


# --- One kernel call ------------------------------------------------------------------------------


class _Gradients(Enum):
    """How gradients are computed."""

    KERNEL = "by the kernel's own backward, in one call"
    MATERIALISED = "from materialised scores"
    OTHERWISE = "as those of any other call"


@dataclass(slots=True, eq=False)
class DirectCall:
    """A call that is one kernel call.

    Attributes:
        request: the call, without its tensors.
        kernel: what computes: a registered kernel by its name, or one of ours under a mask.
        recorded: the same, if torch's autograd records its operator with all that the backward
            needs; None: the gradient is ours.
        gradients: how ours are computed in one call, by what that depends on.
    """

    request: Request
    kernel: str | InnerKernel
    recorded: InnerKernel | None = None
    gradients: dict[tuple[object, ...], _Gradients] = field(default_factory=dict)

    def output(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The output; None where memory ran out."""
        request = self.request
        try:
            if self.recorded is not None:
                found = self.recorded.recorded_forward(
                    Call(query, key, value, request.work.is_causal, request.scale, self._bias(mask))
                )
                if found is not None:
                    return named_derivative(found)
            if request.records:
                made: torch.Tensor = _Direct.apply(query, key, value, mask, self)
                return made
            return self.forward(query, key, value, mask)[0]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        request = self.request
        call = Call(
            query, key, value, request.work.is_causal, request.scale, self._bias(mask),
            request.out_dtype,
        )  # fmt: skip
        out, lse = get_kernel(self.kernel).whole_forward(call)
        return as_own(out), lse

    def _bias(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        request = self.request
        if mask is None:
            return None
        return MaskView(mask, 1).whole(request.work.dtype, request.options.device)

    def backward(
        self,
        grad_out: torch.Tensor,
        three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """The gradients of query, key and value; None where they are not one kernel call."""
        work = self.request.work
        usual = type(grad_out) is torch.Tensor and grad_out.layout is torch.strided
        if not usual or grad_out.dtype != work.dtype or grad_out.device != out.device:
            return None
        if _records() or _is_transformed() or _autocast(out.device.type) or grad_out.is_neg():
            return None
        how = self._how(grad_out, three, out, lse, mask)
        if how is _Gradients.OTHERWISE:
            return None
        kernel, scale = get_kernel(self.kernel), self.request.scale
        try:
            bias = self._bias(mask)
            if not kernel.empty_rows:
                lse = without_empty_rows(lse)
            if how is _Gradients.KERNEL:
                return kernel.whole_backward(
                    Call(*three, work.is_causal, scale, bias, work.dtype),
                    Saved(operand(grad_out, work.dtype), operand(out, work.dtype), lse),
                )
            made = materialised(work, scale, grad_out, three, out, lse, bias)
            return None if made is None else tuple([as_own(g.to(work.dtype)) for g in made])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The next one is decided anew, by what is free then.
            self.gradients.clear()
        return None

    def _how(
        self,
        grad_out: torch.Tensor,
        three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _Gradients:
        state = _deterministic(), registrations(), torch.get_num_threads()
        # Not problem for by its name again: another thread's backward may have run out of memory.
        how = self.gradients.get(state)
        if how is None:
            given = Given(grad_out, out, lse)
            _, decision = decide_backward(Tensors(*three, mask), self.request, given)
            how = self.gradients[state] = self._gradients_of(decision)
        return how

    def _gradients_of(self, decision: Decision) -> _Gradients:
        work, kernel = self.request.work, decision.kernel
        if kernel is not get_kernel(self.kernel) or not _is_one_call(decision, self.request):
            return _Gradients.OTHERWISE
        if materialises(work, kernel):
            return _Gradients.MATERIALISED
        # Such gradients are looked at afterwards, or need another output.
        other = scales(kernel, work) or corrected_bytes(work, kernel)
        return _Gradients.OTHERWISE if other else _Gradients.KERNEL


class _Direct(Quick):
    """``DirectCall`` as a function of autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        known: DirectCall,
    ) -> torch.Tensor:
        out, lse = known.forward(query, key, value, mask)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        (grad_out,) = grad_outputs
        if grad_out is None:
            return None, None, None, None, None
        refuse_batched(grad_out)
        query, key, value, mask, out, lse = ctx.saved_tensors
        known: DirectCall = ctx.known
        grads = known.backward(grad_out, (query, key, value), out, lse, mask)
        if grads is None:
            grads = gradients(grad_out, query, key, value, out, lse, mask, known.request)
        needed = ctx.needs_input_grad
        return (*[g if n else None for g, n in zip(grads, needed, strict=False)], None, None)


def direct_call(tensors: Tensors, request: Request) -> DirectCall | None:
    """How a call is run that is one kernel call; None if it is not, or is not to be remembered."""
    if is_trivial(tensors) or len(request.work.batch_shape) != 1 or request.runner is not None:
        return None
    problem, decision = decide_forward(tensors, request)
    if not _is_one_call(decision, request):
        return None
    kernel = decision.kernel
    if kernels().get(kernel.name) is kernel:
        mask = tensors.mask
        large = mask is not None and mask.dtype == torch.bool and 4 * mask.numel() > _MOST_BIAS
        able = None if large else _recorded(kernel, problem, request)
        return DirectCall(request, kernel.name, able)
    # One of ours under a mask: a call that names a kernel of its own is not remembered.
    return DirectCall(request, kernel) if kernel.empty_rows else None


def _recorded(kernel: InnerKernel, problem: Problem, request: Request) -> InnerKernel | None:
    """``kernel``, if torch's autograd can record its operator in place of ours."""
    if not kernel.takes_recorded(problem.call_shape):
        return None
    if request.records:
        if problem.work.dtype == torch.float16 or materialises(problem.work, kernel):
            return None
        after = replace(problem, place=place_after(problem.place, request), backward=True)
        return kernel if decide(after) == Decision(kernel) else None
    return kernel


def _is_one_call(decision: Decision, request: Request) -> bool:
    plan = decision.plan
    if plan is None:
        return True
    if not backend_of(request.options.device).own_memory:
        return False
    return isinstance(plan.schedule.route, Whole) and plan.schedule.is_all(request.work)


# --- The cache ------------------------------------------------------------------------------------

# By their keys; None: they are not one kernel call.
_CACHE: dict[Hashable, DirectCall | None] = {}


def find_cached(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> tuple[torch.Tensor | None, Hashable | None]:
    """Makes a call without other options as one before.

    Returns:
        (output or None, what the call is to be remembered by or None).
    """
    name = cache_key(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    known = None if name is None else _CACHE.get(name)
    if known is None:
        return None, name
    mask = attn_mask if isinstance(attn_mask, torch.Tensor) else None
    out = known.output(query, key, value, mask)
    if out is not None:
        return out, name
    # It may run out of memory again: it is remembered by the next call like it that does not.
    _CACHE.pop(name, None)
    return None, None


def output(
    tensors: Tensors,
    request: Request,
    out: torch.Tensor | None,
    name: Hashable | None,
    given: tuple[object, object, object],
) -> torch.Tensor:
    """The output of a call that has been checked; it is remembered.

    Args:
        out: as the caller gave it.
        name: what it is to be remembered by; None: it is not.
        given: query, key and value as the caller gave them.
    """
    # Of tensors that were broadcast or cast, others like the given ones are not.
    same = all(one is other for one, other in zip(tensors[:3], given, strict=True))
    if same and name is not None and name not in _CACHE:
        known = direct_call(tensors, request)
        made = None if known is None else known.output(*tensors[:4])
        # Not once more, unless memory runs out. Then it is not remembered either: a short call is
        # decided without asking how much is free.
        if known is None or made is not None:
            if len(_CACHE) >= _MOST:
                forget_all()
            _CACHE[name] = known
        if made is not None:
            return made
    return attend(tensors, request, out)[0]


def forget_all() -> None:
    """Nothing is remembered any more."""
    _CACHE.clear()


__all__ = ["DirectCall", "cache_key", "direct_call", "find_cached", "forget_all", "output"]
