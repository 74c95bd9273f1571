"""torch's own attention function taken over: for a block (``patched_sdpa``), or for good
(``patch_sdpa``, ``unpatch_sdpa``).

The name ``torch.nn.functional.scaled_dot_product_attention`` gets another function, as long as any
block or the permanent patch needs it. That function looks at the settings where it is called, so
threads without them get torch's own. What ``attention`` cannot take goes to torch's own with the
very arguments that came.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.causal_bias import as_mask, is_causal_bias
from quorum_attention.call.options import Device, Written
from quorum_attention.call.request import request_of
from quorum_attention.call.settings import (
    UNSAID,
    Layer,
    Settings,
    current,
    filled,
    layer_of,
    set_base,
    using,
)
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.report import Report
from quorum_attention.execution.workload import ELEMENT_BYTES
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.torch_private import capturing, is_fake, is_traced
from quorum_attention.mask import Mask
from quorum_attention.operator import as_operator

_Sdpa = Callable[..., torch.Tensor]
_NAMES = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
)  # fmt: skip
_DEFAULTS = (None, None, None, None, 0.0, False, None, False)
_POSITIONAL = 6
_MASK = _NAMES.index("attn_mask")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
MIN_TOKENS = 4096

_lock = Lock()
# ``min_tokens`` of all blocks that are open in any thread, and of the permanent patch; None for one
# that turns the patch off.
_open: list[int | None] = []
# The least of them, for code that is compiled: torch's compiler cannot look at a context.
_least: int | None = None


class patched_sdpa(using):  # noqa: N801 (used as a function is, as torch.no_grad)
    """``attention`` in place of torch's ``scaled_dot_product_attention`` within a ``with`` block.

    It is ``using`` with the patch: the options hold for ``attention`` too, inner blocks win, blocks
    may end in any order, and threads that begin inside do not have it (``patch_sdpa`` is for all).
    Modules that imported the function by name before keep torch's own.

    To torch's own go, with the arguments as they came: calls of one query, of fewer tokens than
    ``min_tokens``, of tensors that are none of torch's plain ones (subclasses, nested, sparse,
    on other devices), in forward-mode, under nested derivatives of torch.func, with only the math
    backend enabled (which has second derivatives), while a CUDA graph is captured, and whatever
    ``attention`` refuses before it begins. A budget that is too small is an error, as ever.

    Args:
        min_tokens: calls with fewer go to torch's own; of queries and keys the longer counts.
        enabled: False leaves all calls inside to torch's own.

    Other arguments, and errors, as in ``using``.

    Examples:
        >>> from torch.nn import functional
        >>> report = qa.Report()
        >>> q = torch.randn(1, 2, 300, 16)
        >>> with qa.patched_sdpa(min_tokens=100, report=report):
        ...     out = functional.scaled_dot_product_attention(q, q, q)
        >>> report.total.forwards
        1
    """

    def __init__(
        self,
        *,
        min_tokens: int = MIN_TOKENS,
        enabled: bool = True,
        budget: int | str | None = UNSAID,
        depth: int | str = UNSAID,
        kernel: str | InnerKernel = UNSAID,
        accumulator: str = UNSAID,
        devices: Device | None = UNSAID,
        progress: Any = UNSAID,
        report: Report | None = UNSAID,
    ) -> None:
        self._layer = layer_of(
            sdpa=enabled, min_tokens=min_tokens, budget=budget, depth=depth, kernel=kernel,
            accumulator=accumulator, devices=devices, progress=progress, total=report,
        )  # fmt: skip

    def __enter__(self) -> patched_sdpa:
        _hold(self._layer)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _release(self._layer)


_permanent: Layer | None = None


def patch_sdpa(
    *,
    min_tokens: int = MIN_TOKENS,
    budget: int | str | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    accumulator: str = "auto",
    devices: Device | None = None,
    progress: Any = None,
    report: Report | None = None,
) -> None:
    """Have ``attention`` in place of ``scaled_dot_product_attention`` in all threads, from now on.

    Its options lie below those of all blocks. Called again, it replaces them.

    Args, errors: as of ``patched_sdpa``.

    Examples:
        >>> qa.patch_sdpa(budget="2GiB")
        >>> qa.unpatch_sdpa()
    """
    layer = layer_of(
        sdpa=True, min_tokens=min_tokens, budget=budget, depth=depth, kernel=kernel,
        accumulator=accumulator, devices=devices, progress=progress, total=report,
    )  # fmt: skip
    _replace_permanent(layer)


def unpatch_sdpa() -> None:
    """Undo ``patch_sdpa``; blocks that are open stay as they are. Nothing where there is none."""
    _replace_permanent(None)


def _replace_permanent(layer: Layer | None) -> None:
    global _permanent
    if layer is not None:
        _hold(layer)
    with _lock:
        before, _permanent = _permanent, layer
        set_base(layer)
    if before is not None:
        _release(before)


# --- The name in torch.nn.functional ----------------------------------------------------------


def _hold(layer: Layer) -> None:
    """Put our function in place, unless it is there."""
    with _lock:
        _open.append(_tokens(layer))
        _note_least()
        there = torch.nn.functional.scaled_dot_product_attention
        # Over a sharded sequence (``distributed.context_parallel``) the settings are enough.
        sharded = hasattr(there, "_quorum_attention_sharded")
        if not sharded and not hasattr(there, "_quorum_attention_original"):
            torch.nn.functional.scaled_dot_product_attention = _instead_of(there)


def _release(layer: Layer) -> None:
    """Put back what was there, if nobody needs ours any more, and it still is the one in place."""
    with _lock:
        _open.remove(_tokens(layer))
        _note_least()
        there = torch.nn.functional.scaled_dot_product_attention
        original = getattr(there, "_quorum_attention_original", None)
        if not _open and original is not None:
            torch.nn.functional.scaled_dot_product_attention = original


def _tokens(layer: Layer) -> int | None:
    tokens: int = layer.fields["min_tokens"]
    return tokens if layer.fields["sdpa"] else None


def _note_least() -> None:
    global _least
    on = [tokens for tokens in _open if tokens is not None]
    _least = min(on) if on and len(on) == len(_open) else None


def _instead_of(original: _Sdpa) -> _Sdpa:
    def scaled_dot_product_attention(*args: Any, **named: Any) -> torch.Tensor:
        own = original
        mask: Any = args[_MASK] if len(args) > _MASK else named.get("attn_mask")
        if is_causal_bias(mask):
            # It looks for the name in torch.nn.functional, and does not know torch's own there.
            own = mask._dispatch
        if torch.compiler.is_dynamo_compiling():
            taken = _taken_in_a_graph(args, named)
        else:
            settings = current()
            if settings is None or not settings.sdpa:
                return own(*args, **named)
            taken = _taken(settings, args, named)
        return own(*args, **named) if taken is None else taken

    scaled_dot_product_attention.__doc__ = original.__doc__
    scaled_dot_product_attention._quorum_attention_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


# --- Which calls are taken --------------------------------------------------------------------


def _taken(settings: Settings, args: Any, named: Any) -> torch.Tensor | None:
    """The result of a call; None if it is torch's."""
    call = _read(args, named)
    if call is None or not _fits(call, settings.min_tokens) or _is_special(call[0]):
        return None
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
    if is_traced(query, key, value):
        if not _is_known(call):
            return None
        return _operator(call)
    try:
        tensors, request = request_of(
            "attention", query, key, value, mask, dropout_p, None, is_causal, scale, enable_gqa,
            None, None, filled(Written()),
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError):
        return None  # torch's own can do it, or says why not in its own words
    try:
        return attend(tensors, request, None)[0]
    except NotImplementedError:  # no kernel: said before any work
        return None


def _taken_in_a_graph(args: Any, named: Any) -> torch.Tensor | None:
    """As ``_taken``, as far as can be said while torch's compiler traces. The settings are looked
    up when the graph runs."""
    call = _read(args, named)
    if call is None or _least is None or not _fits(call, _least) or not _is_known(call):
        return None
    return _operator(call)


def _operator(call: tuple[Any, ...]) -> torch.Tensor | None:
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
    found = as_operator(
        query, key, value, mask, dropout_p, None, is_causal, scale, enable_gqa, None, Written()
    )
    return None if found is None else found[0]


def _read(args: Any, named: Any) -> tuple[Any, ...] | None:
    """The arguments in their order; None if torch's own would not take them."""
    if len(args) > _POSITIONAL or any(name not in _NAMES[len(args) :] for name in named):
        return None
    rest = zip(_NAMES[len(args) :], _DEFAULTS[len(args) :], strict=True)
    call = (*args, *[named.get(name, default) for name, default in rest])
    query, key, value, mask = call[:4]
    if isinstance(mask, Mask):
        return None
    if is_causal_bias(mask):
        try:
            return (query, key, value, as_mask(mask, query, key), *call[4:])
        except ValueError:
            return None
    return call


def _fits(call: tuple[Any, ...], min_tokens: int) -> bool:
    """Whether a call is of plain tensors, long enough, and makes sense to torch."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = call
    for tensor in (query, key, value):
        if type(tensor) not in _PLAIN and not _is_of_a_trace(tensor):
            return False
        if tensor.is_nested or tensor.dim() < 2:
            return False
    if isinstance(mask, Mask):
        if is_causal:  # refused by torch's own
            return False
    elif mask is not None:
        if type(mask) not in _PLAIN and not _is_of_a_trace(mask):
            return False
        # torch's own refuses both of these.
        if is_causal or (mask.dtype != torch.bool and mask.dtype != query.dtype):
            return False
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        return False
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:
        return False
    if scale is not None and not isinstance(scale, (int, float)):
        return False
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    long = n_queries >= min_tokens or n_keys >= min_tokens
    return bool(n_queries > 1 and n_keys > 0 and long)


def _is_of_a_trace(tensor: object) -> bool:
    # torch's compiler says of its own fake tensors that they are plain ones.
    return not torch.compiler.is_dynamo_compiling() and is_fake(tensor)


def _is_known(call: tuple[Any, ...]) -> bool:
    """Whether ``attention`` takes tensors of such dtypes, devices and shapes."""
    query, key, value, *_, enable_gqa = call
    return (
        query.device.type in BACKENDS
        and query.dtype in ELEMENT_BYTES
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.layout == key.layout == value.layout == torch.strided
        and query.dim() == key.dim() == value.dim() >= 3
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] > 0
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[:-3] == key.shape[:-3]
        and (query.shape[-3] == key.shape[-3] or enable_gqa)
    )


def _is_special(query: torch.Tensor) -> bool:
    """Whether the call is one that has to be torch's own, whatever its arguments."""
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._is_tracing():
        return True
    if capturing(query.device):
        return True
    if torch._C._are_functorch_transforms_active():
        kinds = [one.key() for one in torch._C._functorch.get_interpreter_stack() or ()]
        grads = kinds.count(torch._C._functorch.TransformType.Grad)
        if grads > 1 or torch._C._functorch.TransformType.Jvp in kinds:
            return True
    return not (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    )
