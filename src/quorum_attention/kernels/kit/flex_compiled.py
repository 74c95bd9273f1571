"""FlexAttention compiled for one kind of call, at any length."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from quorum_attention.kernels.kit.laid_out import sixteenth, told
from quorum_attention.kernels.kit.materialised import ScoreMod

_NUMBERS = count()


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """``flex(query, key, value, block_mask, score_mod=, scale=) -> (out, lse)``, compiled anew.

    Args:
        in_blocks: queries and keys are whole blocks. Of sizes that vary FlexAttention would not
            know, and test every row.

    torch.compile keeps what it compiled with a function's code, up to a limit that everything
    compiled from one code shares; beyond it FlexAttention would quietly make every score. So each
    gets a code of its own, which raises beyond the limit, and then another.
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
        sixteenths: tuple[int | None, ...],
    ) -> Any:
        told(query, sixteenths[0])
        told(key, sixteenths[1])
        told(value, sixteenths[2])
        return flex_attention(
            query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
            kernel_options=options,
        )  # fmt: skip

    def anew() -> Callable[..., Any]:
        code = flex.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
        own = types.FunctionType(code, flex.__globals__, code.co_name, None, flex.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=True)
        return compiled

    current = anew()
    too_many = _beyond_the_limit()

    def call(*args: Any, **named: Any) -> Any:
        nonlocal current
        named["sixteenths"] = tuple(map(sixteenth, args[:3]))
        # Sizes that happen to be equal, to each other or to the number of heads, are not taken to
        # be so for ever: every task would be compiled again.
        # (What torch has to set such things for a while takes as long as all guards.)
        before, fx_config.use_duck_shape = fx_config.use_duck_shape, False
        try:
            return current(*args, **named)
        except too_many:
            # Modifications of one code may hold what torch tells apart (words, lists of other
            # lengths): that begins anew.
            current = anew()
            return current(*args, **named)
        finally:
            fx_config.use_duck_shape = before

    return call


def _beyond_the_limit() -> type[Exception]:
    """What torch raises where one code would be compiled too often; an error of ours, which nobody
    raises, where this torch has no such thing."""
    from torch._dynamo import exc

    found: type[Exception] = getattr(exc, "FailOnRecompileLimitHit", UnknownToTorchError)
    return found


class UnknownToTorchError(Exception):
    """Stands for an error that this torch does not have."""
