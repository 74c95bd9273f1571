"""Calls that are one kernel call, made again without being checked, decided or planned.

To check a call and to decide how it runs takes the host longer than many calls take the device. So
a call that asks for attention and nothing more is looked up first, by all that its checks and its
decision depend on (``cache_key``). What is remembered is the kernel of the call, and whether its
gradients are one kernel call too. Where memory runs out the call is decided as any other, by what
is free then. Nothing is remembered that holds a tensor, or a kernel that its user may let go.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.autograd import RESULTS, Attention, EagerCall, Read, attend
from quorum_attention.call.gradients import BackwardInputs
from quorum_attention.call.options import Arguments, several
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import current, filled
from quorum_attention.call.transforms import refuse_batched
from quorum_attention.call.validation import Tensors
from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.call import MaskView, operand
from quorum_attention.execution.device.lookup import BACKENDS, backend_of, best_device
from quorum_attention.execution.problem import is_small, scales
from quorum_attention.execution.routes.over_inputs import Whole, without_empty_rows
from quorum_attention.kernels.protocol import Call, InnerKernel, Saved
from quorum_attention.kernels.registry import registrations
from quorum_attention.kernels.torch_private import has_modes, has_transforms, uncompiled
from quorum_attention.mask import Mask
from quorum_attention.passes import as_own, decide_backward, decide_forward, is_trivial
from quorum_attention.planner.calibration import rates_known
from quorum_attention.planner.decide import Decision

# By names of this file: to look them up in torch would take longer than the shortest calls.
_forward_ad, _autocast = torch.autograd.forward_ad, torch.is_autocast_enabled
_deterministic, _strided = torch._C._get_deterministic_algorithms, torch.strided
_tracing, _records = torch._C._is_tracing, torch.is_grad_enabled
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (bool, int, float, str)
_WORD = 16
# Calls that are remembered; when there are more, all are forgotten. (Under a mask each keeps its
# kernel's tables in page-locked memory, 0.4 MB for 262,144 tokens.)
_MOST = 128


# --- What a call is looked up by ----------------------------------------------------------------


def cache_key(query: Any, key: Any, value: Any, call: Arguments) -> Hashable | None:
    """What a call is looked up by; None if it is none that is remembered, as one with options.
    Calls of one key differ in their numbers only, and in host memory in how many keys they have
    where no gradients are recorded."""
    attn_mask, dropout_p, seed, is_causal, scale, enable_gqa, out, out_dtype, written = call
    if not (
        type(dropout_p) is float and dropout_p == 0.0 and written.says_nothing
        and out is None and out_dtype is None and seed is None
        and type(is_causal) is bool and type(enable_gqa) is bool
        and (scale is None or type(scale) is float)
    ):  # fmt: skip
        return None
    three = query, key, value
    for tensor in three:
        if not _is_plain(tensor) or tensor.dim() != 4:
            return None
    kind = query.device.type
    backend = BACKENDS.get(kind)
    # Before sizes are looked at: under a trace they may be tensors.
    if backend is None or _is_unusual(kind):
        return None
    mask = () if attn_mask is None else _described(attn_mask, query.device)
    if mask is None:
        return None
    try:
        # To a multiple of a word, at which a GPU's operators want rows to begin.
        starts = [tensor.data_ptr() % _WORD for tensor in three]
    except RuntimeError:
        # It has no memory of its own: it belongs to a transformation, even to one that is over.
        return None
    records = _records() and (query.requires_grad or key.requires_grad or value.requires_grad)
    # Keys may be more by the next call of a model that decodes on a CPU.
    grows = not (backend.own_memory or records or is_causal or mask)
    grows = grows and 0 < key.shape[2] == value.shape[2] and best_device().type == "cpu"
    return (
        _lies(query), _lies(key, grows), _lies(value, grows), *starts,
        mask, is_causal, scale, enable_gqa, records, backend, best_device(),
        _deterministic(), registrations(), rates_known(),
    )  # fmt: skip


def _lies(tensor: torch.Tensor, grows: bool = False) -> Hashable:
    """Sizes, steps and kind of a tensor; of one that ``grows`` with the calls, its rows rounded
    up, as decisions do (``planner/decide.py``)."""
    if not grows:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    batch, heads, rows, dim = tensor.shape
    # That of a batch of one says nothing, and grows where rows lie before heads.
    steps = tensor.is_contiguous() or tensor.stride()[batch == 1 :]
    return batch, heads, (rows - 1).bit_length(), dim, steps, tensor.dtype, tensor.device


def _is_plain(tensor: Any) -> bool:
    """Whether it is a dense tensor of torch's own classes. (Another may not even have sizes.)"""
    if type(tensor) not in _PLAIN or tensor.layout is not _strided:
        return False
    return not (tensor.is_nested or tensor.is_neg())


def _described(mask: Any, device: torch.device) -> Hashable | None:
    """A mask: in host memory a tensor, by how it lies; on a GPU a ``Mask`` without tensors,
    functions and other masks, in numbers. None for others."""
    if not BACKENDS[device.type].own_memory:
        if not _is_plain(mask) or mask.device != device or mask.requires_grad:
            return None
        return mask.shape, mask.stride(), mask.dtype
    if type(mask) is not Mask:
        return None
    said = mask.said()
    said.pop("window", None)
    plain = all(type(value) in _NUMBERS for value in said.values())
    return (mask.sides, *said.items()) if plain else None


def _is_unusual(kind: str) -> bool:
    """Whether anything is active under which a call is not what its arguments say: settings, a
    checkpoint that keeps results, a trace or a mode, a transformation, forward-mode, autocast."""
    return (
        current() is not None
        or RESULTS.get() is not None
        or has_modes()
        or _tracing()
        or _is_transformed()
        or _autocast(kind)
    )


def _is_transformed() -> bool:
    """Whether a transformation of torch.func or forward-mode is active."""
    return has_transforms() or bool(_forward_ad._current_level >= 0)


# --- One kernel call ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DirectCall(EagerCall):
    """A call that is one kernel call.

    Attributes:
        kernel: what computes.
        backwards: whether its gradients are one kernel call, by what that depends on.
    """

    kernel: InnerKernel
    backwards: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def results(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(out, lse); None where memory ran out."""
        try:
            if self.request.records:
                made: tuple[torch.Tensor, torch.Tensor] = Attention.apply(*tensors, self)
                return made
            return self.forward(tensors)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def forward(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        out, lse = self.kernel.whole_forward(self._call(tensors, self.request.out_dtype))
        return as_own(out), lse

    def _call(self, tensors: Tensors, out_dtype: torch.dtype) -> Call:
        query, key, value, mask = tensors[:4]
        work, bias = self.request.work, None
        if mask is not None:
            bias = MaskView(mask, 1).whole(work.dtype, self.request.options.device)
        return Call(query, key, value, work.is_causal, self.request.scale, bias, out_dtype)

    def gradients(self, read: Read, learned: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """As ``EagerCall.gradients``."""
        grad_out, query, key, value, out, lse, mask, _, grad_lse, _ = read
        refuse_batched(grad_out)
        tensors, dtype = Tensors(query, key, value, mask), self.request.work.dtype
        if grad_lse is None and self._is_one_backward(grad_out, tensors, out, lse):
            try:
                lse = lse if self.kernel.empty_rows else without_empty_rows(lse)
                kept = Saved(operand(grad_out, dtype), operand(out, dtype), lse)
                return self.kernel.whole_backward(self._call(tensors, dtype), kept)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # The next one is decided anew, by what is free then.
                self.backwards.clear()
        return EagerCall.gradients(self, read, learned)

    def _is_one_backward(
        self, grad_out: torch.Tensor, tensors: Tensors, out: torch.Tensor, lse: torch.Tensor
    ) -> bool:
        """Whether the gradients are one kernel call."""
        work, kernel = self.request.work, self.kernel
        if not _is_plain(grad_out) or grad_out.dtype != work.dtype or grad_out.device != out.device:
            return False
        if _records() or _is_transformed() or _autocast(out.device.type):
            return False
        state = _deterministic(), registrations(), torch.get_num_threads()
        if state not in self.backwards:
            decision = decide_backward(tensors, self.request, BackwardInputs(grad_out, out, lse))
            # Such gradients are the reference's, or looked at afterwards.
            other = is_small(work, kernel) or scales(kernel, work)
            self.backwards[state] = (
                decision.kernel is kernel and _is_one_call(decision, self.request) and not other
            )
        return self.backwards[state]


def direct_call(tensors: Tensors, request: Request) -> DirectCall | None:
    """How a call is run that is one kernel call; None if it is not."""
    if is_trivial(tensors) or len(request.work.batch_shape) != 1 or request.runner is not None:
        return None
    decision = decide_forward(tensors, request)
    return DirectCall(request, decision.kernel) if _is_one_call(decision, request) else None


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


@uncompiled
def attend_eagerly(
    query: Any, key: Any, value: Any, call: Arguments, *, cached: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call that is not traced: as one before it, or else checked and planned."""
    name = cache_key(query, key, value, call) if cached else None
    known = None if name is None else _CACHE.get(name)
    if known is not None:
        mask = call.attn_mask if isinstance(call.attn_mask, torch.Tensor) else None
        made = known.results(Tensors(query, key, value, mask))
        if made is not None:
            return made
        # Memory ran out: calls like it are decided anew, by what is free then.
        _CACHE.pop(name, None)
    tensors, request = checked_request("attention", query, key, value, call)
    # Of tensors that were broadcast, others like the given ones are not.
    same = tensors.query is query and tensors.key is key and tensors.value is value
    if same and name is not None and known is None and name not in _CACHE:
        _remember(name, tensors, request)
    return attend(tensors, request, call.out)


def checked_request(
    function: str, query: Any, key: Any, value: Any, call: Arguments
) -> tuple[Tensors, Request]:
    """``request_of`` with the settings here, of a call for which several devices may be named."""
    call = call._replace(written=filled(call.written))
    if several(call.written.devices):
        from quorum_attention.devices import pool  # processes, only where they are used

        return pool.request_on_devices(function, query, key, value, call)
    return request_of(function, query, key, value, call)


def _remember(name: Hashable, tensors: Tensors, request: Request) -> None:
    """Find out what calls of this name are."""
    if len(_CACHE) >= _MOST:
        forget_all()
    _CACHE[name] = direct_call(tensors, request)


def forget_all() -> None:
    """Nothing is remembered any more."""
    _CACHE.clear()
