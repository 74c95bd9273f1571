"""FlexAttention compiled for one kind of call, at any length."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from quorum_attention.kernels.kit.materialised import ScoreMod

_NUMBERS = count()


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """``flex(query, key, value, block_mask, score_mod=, scale=) -> (out, lse)``, compiled anew.

    Args:
        in_blocks: queries and keys are whole blocks. Of sizes that vary FlexAttention would not
            know, and test every row.

    torch.compile keeps what it compiled with a function's code, up to a limit that everything
    compiled from one code shares; beyond it FlexAttention would quietly make every score. So each
    gets a code of its own, and raises beyond the limit.
    """
    from torch.fx.experimental import _config
    from torch.nn.attention.flex_attention import flex_attention

    fx_config: Any = _config
    # Not the kernel for a few queries, which has other limits.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": in_blocks}

    def flex(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: Any,
        score_mod: ScoreMod | None,
        scale: float,
    ) -> Any:
        return flex_attention(
            query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
            kernel_options=options,
        )  # fmt: skip

    code = flex.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
    own = types.FunctionType(code, flex.__globals__, code.co_name, None, flex.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=True)

    def call(*args: Any, **named: Any) -> Any:
        # Sizes that happen to be equal, to each other or to the number of heads, are not taken to
        # be so for ever: every task would be compiled again.
        with fx_config.patch(use_duck_shape=False):
            return compiled(*args, **named)

    return call
