"""FlexAttention compiled for one kind of call, at any length."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from quorum_attention.kernels.kit.laid_out import assume_stride_multiple, sixteenth
from quorum_attention.kernels.kit.materialised import ScoreMod

_NUMBERS = count()


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """``flex(query, key, value, block_mask, score_mod=, scale=) -> (out, lse)``, compiled anew.

    Args:
        in_blocks: queries and keys are whole blocks. For dynamic sizes FlexAttention cannot know
            that, and would test every row.

    torch.compile caches by code object, up to a limit for each. Beyond the limit FlexAttention
    would silently fall back to computing every score. So each compiled call has a code object of
    its own; beyond the limit it raises an error here, and is then given another code object.
    """
    from torch.fx.experimental import _config
    from torch.nn.attention.flex_attention import flex_attention

    fx_config: Any = _config
    # Forced, because torch's kernel for few queries has other limits.
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
        assume_stride_multiple(query, sixteenths[0])
        assume_stride_multiple(key, sixteenths[1])
        assume_stride_multiple(value, sixteenths[2])
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
        # Without this, torch assumes that sizes that are equal once always are (also a size and the
        # number of heads), and compiles again for tasks where they differ. It is set by hand,
        # because torch's context manager for it takes as long as all guards.
        before, fx_config.use_duck_shape = fx_config.use_duck_shape, False
        try:
            return current(*args, **named)
        except too_many:
            # Functions with one code may close over values for which torch compiles again (strings,
            # lists of other lengths).
            current = anew()
            return current(*args, **named)
        finally:
            fx_config.use_duck_shape = before

    return call


def _beyond_the_limit() -> type[Exception]:
    """The error that torch raises if one code object is compiled too often.

    If this torch has no such error: one that is never raised.
    """
    from torch._dynamo import exc

    found: type[Exception] = getattr(exc, "FailOnRecompileLimitHit", UnknownToTorchError)
    return found


class UnknownToTorchError(Exception):
    """In place of an error that this torch does not have; never raised."""
