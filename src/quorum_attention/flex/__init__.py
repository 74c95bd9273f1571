"""FlexAttention's function taken over: for a block, ``patched_flex_attention``.

The name ``torch.nn.attention.flex_attention.flex_attention`` gets another function
while a block is open, and so does each module that imported the function by name. That
function looks at the settings where it is called, so threads without them get torch's
own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quorum_attention.argument_checks import switch, whole_number
from quorum_attention.call.options import SettingsKeywords
from quorum_attention.call.settings import MIN_TOKENS, checked_settings, using
from quorum_attention.flex.settings import LEAST_TOKENS_SETTING

if TYPE_CHECKING:
    from typing_extensions import Unpack


class patched_flex_attention(using):  # noqa: N801 (used as a function is, as torch.no_grad)
    """Replace FlexAttention's function by ``attention`` within a ``with`` block.

    The block is a block ``using`` too: its options also hold for calls of
    ``attention``, and inner blocks win. Blocks may end in any order. Threads that begin
    inside the block keep torch's function. If the function is compiled inside the
    block, ``attention`` runs outside the compiled graph, and ``fullgraph=True`` raises.
    A function that was compiled before the block keeps torch's.

    torch's own function still computes some calls: those with one query or with fewer
    tokens than ``min_tokens``; those with tensors that are not plain (subclasses,
    nested, on other devices); those of several dtypes or batch sizes; those with fewer
    heads of keys than of queries, without ``enable_gqa``; and those that ask for the
    largest scores (``return_aux``).

    Args:
        min_tokens: torch's function computes calls with fewer tokens; the longer of
            queries and keys counts.
        enabled: False: torch's function computes all calls in the block.

    Other arguments, and errors, as in ``using``. ``kernel`` holds for calls without a
    ``score_mod``.

    Tensors that ``score_mod`` reads get their gradients (docs/programs.md).

    Raises:
        NotImplementedError: the ``score_mod`` of a call reads a tensor that requires a
            gradient, and this tensor is not in the function's closure, defaults or
            attributes, and no global variable.

    Examples:
        >>> from torch.nn.attention import flex_attention as flex
        >>> q = torch.randn(1, 2, 300, 16)
        >>> def alibi(score, batch, head, query, key):
        ...     return score - (query - key).abs()
        >>> with qa.patched_flex_attention(min_tokens=100, budget="16 MiB"):
        ...     out = flex.flex_attention(q, q, q, alibi)
    """

    def __init__(
        self,
        *,
        min_tokens: int = MIN_TOKENS,
        enabled: bool = True,
        **options: Unpack[SettingsKeywords],
    ) -> None:
        whole_number(min_tokens, "min_tokens", 0)
        settings = checked_settings(patched_flex_attention, options)
        is_enabled = switch(enabled, "enabled")
        settings[LEAST_TOKENS_SETTING] = min_tokens if is_enabled else sys.maxsize
        self._set_layer(settings)

    def __enter__(self) -> patched_flex_attention:
        count_blocks(+1)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        count_blocks(-1)


def count_blocks(change: int) -> None:
    """Count a block that opens (1) or closes (-1), and have our function in place while
    any is open."""
    # Imported here: torch's module imports its compiler.
    from quorum_attention.flex import calls

    calls.count_blocks(change)
