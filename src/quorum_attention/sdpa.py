"""torch's own attention function taken over: for a block (``patched_sdpa``), or for
good (``patch_sdpa``, ``unpatch_sdpa``).

The name ``torch.nn.functional.scaled_dot_product_attention`` gets another function, as
long as any block or the permanent patch needs it. That function looks at the settings
where it is called, so threads without them get torch's own. What ``attention`` cannot
take goes to torch's own as it came.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.argument_checks import switch
from quorum_attention.autograd import attend
from quorum_attention.call.options import Arguments, SettingsKeywords
from quorum_attention.call.settings import (
    MIN_TOKENS,
    Settings,
    checked_settings,
    current_settings,
    set_process_settings,
    using,
)
from quorum_attention.call.torch_modules import (
    restore_fast_path,
    switch_fast_path_off,
    watch_weights,
)
from quorum_attention.call.validation import is_causal_bias
from quorum_attention.dispatch import checked_request
from quorum_attention.flex import count_blocks
from quorum_attention.flex.settings import LEAST_TOKENS_SETTING
from quorum_attention.kernels.torch_private import PLAIN, capturing, is_fake, is_traced
from quorum_attention.operator import as_operator

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Sdpa = Callable[..., torch.Tensor]

_lock = RLock()
# ``min_tokens`` of all blocks that are open in any thread, and of the permanent patch;
# the largest number for one that turns the patch off.
_open_min_tokens: list[int] = []


class patched_sdpa(using):  # noqa: N801 (used as a function is, as torch.no_grad)
    """Replace torch's ``scaled_dot_product_attention`` by ``attention`` within a
    ``with`` block.

    The block is a block ``using`` too: its options also hold for calls of
    ``attention``, and inner blocks win. Blocks may end in any order. Threads that begin
    inside the block keep torch's function (``patch_sdpa`` replaces it in all threads).
    So do modules that imported the function by name before the block. In evaluation
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` have a fast path that
    does not call the function. While any block is open, this path is off in all
    threads. If a call of ``nn.MultiheadAttention`` asks for weights, torch still
    computes them, and a warning says so.

    torch's own function still computes some calls: those with one query or with fewer
    tokens than ``min_tokens``; those with tensors that are not plain (subclasses,
    nested, sparse, on other devices); those in forward mode, under nested derivatives
    of torch.func, while a CUDA graph is captured, or while only torch's math backend is
    enabled (it has second derivatives); and those that ``attention`` does not support.
    A budget that is too small raises an error.

    Args:
        min_tokens: torch's function computes calls with fewer tokens; the longer of
            queries and keys counts.
        enabled: False: torch's function computes all calls in the block.
        flex: True takes over FlexAttention's function too, as
            ``patched_flex_attention`` does, for calls of ``min_tokens`` or more.

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
        flex: bool = False,
        **options: Unpack[SettingsKeywords],
    ) -> None:
        settings = checked_settings(
            patched_sdpa,
            options,
            sdpa=switch(enabled, "enabled"),
            min_tokens=min_tokens,
        )
        if switch(flex, "flex"):
            settings[LEAST_TOKENS_SETTING] = _min_tokens(settings)
        self._set_layer(settings)

    def __enter__(self) -> patched_sdpa:
        _count(opened=self._layer)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _count(closed=self._layer)


def patch_sdpa(
    *,
    min_tokens: int = MIN_TOKENS,
    flex: bool = False,
    **options: Unpack[SettingsKeywords],
) -> None:
    """Replace ``scaled_dot_product_attention`` by ``attention`` in all threads, until
    ``unpatch_sdpa``.

    The options of blocks win over these. Another call replaces these options.

    Arguments and errors are those of ``patched_sdpa``.

    Examples:
        >>> qa.patch_sdpa(budget="2GiB")
        >>> qa.unpatch_sdpa()
    """
    settings = checked_settings(patch_sdpa, options, sdpa=True, min_tokens=min_tokens)
    if switch(flex, "flex"):
        settings[LEAST_TOKENS_SETTING] = min_tokens
    _replace_permanent(settings)


def unpatch_sdpa() -> None:
    """Undo ``patch_sdpa``, if there was one; open blocks of ``patched_sdpa`` stay."""
    _replace_permanent(None)


def _replace_permanent(settings: Settings | None) -> None:
    with _lock:  # two threads would count the same former settings as closed
        _count(opened=settings, closed=set_process_settings(settings))


def _count(*, opened: Settings | None = None, closed: Settings | None = None) -> None:
    """Count who needs our functions, and have them in place while anybody does."""
    if _takes_flex(opened):
        count_blocks(+1)
    if _takes_flex(closed):
        count_blocks(-1)
    with _lock:
        if opened is not None:
            _open_min_tokens.append(_min_tokens(opened))
            switch_fast_path_off()
        if closed is not None:
            _open_min_tokens.remove(_min_tokens(closed))
            restore_fast_path()
        for name, replacement_of in _REPLACEMENTS.items():
            _replace(name, replacement_of, opened=opened is not None)


def _takes_flex(settings: Settings | None) -> bool:
    """Tell whether settings take over FlexAttention's function."""
    return settings is not None and LEAST_TOKENS_SETTING in settings


def _replace(
    name: str, replacement_of: Callable[[_Sdpa], _Sdpa], *, opened: bool
) -> None:
    """Put a replacement in place, or put back the original unless another one is in
    place."""
    present = getattr(torch.nn.functional, name)
    original = getattr(present, "_quorum_attention_original", None)
    # Over a sharded sequence (``distributed.context_parallel``) the settings are
    # enough.
    is_sharded = hasattr(present, "_quorum_attention_sharded")
    if opened and original is None and not is_sharded:
        replacement: Any = replacement_of(present)
        replacement._quorum_attention_original = present
        setattr(torch.nn.functional, name, replacement)
    elif not _open_min_tokens and original is not None:
        setattr(torch.nn.functional, name, original)


def _min_tokens(settings: Settings | None) -> int:
    """Return the least number of tokens of calls that settings take over."""
    if settings is None or not settings.get("sdpa"):
        return sys.maxsize
    min_tokens: int = settings["min_tokens"]
    return min_tokens


def _min_tokens_when_compiled() -> int:
    """Return the least of all open blocks: torch's compiler cannot look at a
    context."""
    if sys.maxsize in _open_min_tokens:
        return sys.maxsize
    return min(_open_min_tokens, default=sys.maxsize)


def _replacement_of_sdpa(original: _Sdpa) -> _Sdpa:
    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = False,
        *,
        scale: Any = None,
        enable_gqa: Any = False,
    ) -> torch.Tensor:
        arguments = Arguments(attn_mask, dropout_p, None, is_causal, scale, enable_gqa)
        out = _attention_or_none(query, key, value, arguments)
        if out is not None:
            return out
        # Torch's CausalBias looks for the name in torch.nn.functional, which is ours.
        torch_sdpa: _Sdpa = (
            attn_mask._dispatch if is_causal_bias(attn_mask) else original
        )
        named = {"scale": scale, "enable_gqa": enable_gqa}
        return torch_sdpa(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            **named,
        )

    scaled_dot_product_attention.__doc__ = original.__doc__
    # Python's errors about arguments name the function so.
    scaled_dot_product_attention.__qualname__ = "scaled_dot_product_attention"
    return scaled_dot_product_attention


def _warning_of_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``multi_head_attention_forward`` that warns of calls with weights of many
    tokens."""

    def warn(query: torch.Tensor, key: torch.Tensor) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if max(query.shape[0], key.shape[0]) < _min_tokens(current_settings()):
            return
        warnings.warn(
            "nn.MultiheadAttention was called with need_weights=True, its default, so "
            "torch makes a tensor of tokens x tokens, and quorum attention does not "
            "compute this call: give need_weights=False",
            stacklevel=4,
        )

    return watch_weights(original, warn)


_REPLACEMENTS = {
    "scaled_dot_product_attention": _replacement_of_sdpa,
    "multi_head_attention_forward": _warning_of_weights,
}


def _attention_or_none(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> torch.Tensor | None:
    """Return the output of a call; None leaves the call to torch's own function.

    A call is left to it by its size or kind, or because it was refused before any work:
    torch can do it, or says why not in its own words.
    """
    is_compiling = torch.compiler.is_dynamo_compiling()
    min_tokens = (
        _min_tokens_when_compiled() if is_compiling else _min_tokens(current_settings())
    )
    if not _is_long(query, key, value, arguments, min_tokens):
        return None
    if not is_compiling and _is_special(query):
        return None
    try:
        if is_traced(query, key, value):
            results = as_operator(query, key, value, arguments)
            if results is not None:
                return results[0]
            if is_compiling:
                return None
        tensors, request = checked_request("attention", query, key, value, arguments)
    except (TypeError, ValueError, NotImplementedError):
        return None
    try:
        out, _ = attend(tensors, request, None)
    except NotImplementedError:  # no kernel: said before any work
        return None
    return out


def _is_long(
    query: Any, key: Any, value: Any, arguments: Arguments, min_tokens: int
) -> bool:
    """Tell whether a call is of plain tensors, long enough, and has more than one
    query."""
    if min_tokens == sys.maxsize:
        return False
    if not _is_of_plain_tensors(query, key, value, arguments):
        return False
    n_queries = query.shape[-2]
    n_keys = key.shape[-2]
    if n_queries <= 1 or n_keys <= 0:
        return False
    return bool(n_queries >= min_tokens or n_keys >= min_tokens)


def _is_of_plain_tensors(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> bool:
    """Tell whether a call is of plain tensors, of which torch's own function has no
    complaint."""
    attn_mask = arguments.attn_mask
    if attn_mask is not None and arguments.is_causal:
        return False
    tensors = [query, key, value]
    if attn_mask is not None and not is_causal_bias(attn_mask):
        tensors.append(attn_mask)
    if not all(map(_is_plain_or_fake, tensors)):
        return False
    for tensor in (query, key, value):
        if tensor.is_nested or tensor.dim() < 2:
            return False
    return True


def _is_plain_or_fake(tensor: Any) -> bool:
    """Tell whether this is a tensor of torch's own classes."""
    if type(tensor) in PLAIN:
        return True
    # torch's compiler says of its own fake tensors that they are plain ones.
    return not torch.compiler.is_dynamo_compiling() and is_fake(tensor)


def _is_special(query: torch.Tensor) -> bool:
    """Tell whether a call has to be torch's own, whatever its arguments."""
    if torch.autograd.forward_ad._current_level >= 0 or capturing(query.device):
        return True
    if torch._C._are_functorch_transforms_active():
        kinds = [
            level.key() for level in torch._C._functorch.get_interpreter_stack() or ()
        ]
        transform_type = torch._C._functorch.TransformType
        if kinds.count(transform_type.Grad) > 1 or transform_type.Jvp in kinds:
            return True
    has_fused_backend = (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    )
    return not has_fused_backend
