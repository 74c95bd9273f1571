"""FlexAttention compiled for one kind of call, at any length."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from quorum_attention.kernels.kit.word_layout import (
    assume_stride_multiple,
    head_stride_sixteenth,
    word_layout,
)
from quorum_attention.kernels.masked.block_nodes import BLOCK
from quorum_attention.kernels.masked.captured_tensors import codes
from quorum_attention.kernels.masked.pair_functions import MaskMod, ScoreMod
from quorum_attention.kernels.operator_call import Three

_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class FlexCall:
    """One call for a task, or for a rectangle of it.

    All tensors are detached: torch.compile also looks at the base of a view, and would
    compile again for every kind of view.

    Attributes:
        inputs: query, key and value, each in a ``WordLayout``.
        lists: the block lists on the device (``block_lists.py``).
        mask_mod: the mask of partial blocks, by local indices. There are few kinds,
            because each is compiled.
        score_mod: the score modification, by local indices; None: there is none.
        scale: the factor of the scores.
    """

    inputs: Three
    lists: list[torch.Tensor]
    mask_mod: MaskMod
    score_mod: ScoreMod | None
    scale: float

    @property
    def in_blocks(self) -> bool:
        """Whether queries and keys are whole blocks, so that no row has to be
        tested."""
        return all(tensor.shape[2] % BLOCK == 0 for tensor in self.inputs)

    def kind(self, needs_grad: bool) -> Hashable:
        """Everything that needs code of its own: calls of one kind are compiled once.

        If the functions in a closure change later, torch notices and compiles again.
        """
        query, key, value = self.inputs
        partial_counts = self.lists[0]
        partial_counts_by_key = self.lists[4]
        size_is_one = tuple(
            size == 1
            for counts in (partial_counts, partial_counts_by_key)
            for size in counts.shape
        )
        return (
            query.device,
            query.dtype,
            query.shape[0] == 1,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            codes(self.mask_mod),
            codes(self.score_mod),
            self.in_blocks,
            tuple(word_layout(tensor) for tensor in self.inputs),
            size_is_one,
            needs_grad,
        )

    def block_mask(self) -> Any:
        """The call as a ``BlockMask`` of torch."""
        from torch.nn.attention.flex_attention import BlockMask

        query, key, _ = self.inputs
        # Not BlockMask.from_kv_blocks, which makes the lists by key from a matrix of
        # all blocks.
        make: Any = BlockMask
        return make(
            (query.shape[2], key.shape[2]),
            *self.lists[:8],
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=self.mask_mod,
        )


def compiled_flex(*, in_blocks: bool) -> Callable[..., Any]:
    """Compile ``flex(query, key, value, block_mask, score_mod=, scale=) -> (out,
    lse)``.

    Args:
        in_blocks: queries and keys are whole blocks. For dynamic sizes FlexAttention
            cannot know that, and would test every row.

    torch.compile caches by code object, up to a limit for each. Beyond the limit
    FlexAttention would silently fall back to computing every score. So each compiled
    call has a code object of its own; beyond the limit it raises an error here, and is
    then given another code object.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch.fx.experimental import _config

    fx_config: Any = _config
    current = _compile_once(in_blocks=in_blocks)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal current
        options["sixteenths"] = tuple(map(head_stride_sixteenth, args[:3]))
        # Without this, torch assumes that sizes that are equal once always are (also a
        # size and the number of heads), and compiles again for tasks where they differ.
        # It is set by hand, because torch's context manager for it takes as long as all
        # guards.
        duck_shape = fx_config.use_duck_shape
        fx_config.use_duck_shape = False
        try:
            return current(*args, **options)
        except FailOnRecompileLimitHit:
            # Functions with one code may close over values for which torch compiles
            # again (strings, lists of other lengths).
            current = _compile_once(in_blocks=in_blocks)
            return current(*args, **options)
        finally:
            fx_config.use_duck_shape = duck_shape

    return call


def _compile_once(*, in_blocks: bool) -> Callable[..., Any]:
    """Compile FlexAttention under a code object of its own."""
    from torch.nn.attention.flex_attention import flex_attention

    # ``patched_flex_attention`` may have put its own function around torch's, which
    # calls this.
    flex_attention = inspect.unwrap(flex_attention)

    # Forced, because torch's kernel for few queries has other limits.
    kernel_options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": in_blocks}

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
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=True,
            kernel_options=kernel_options,
        )

    code = flex.__code__.replace(co_name=f"flex_{next(_NUMBERS)}")
    function = types.FunctionType(
        code,
        flex.__globals__,
        code.co_name,
        None,
        flex.__closure__,
    )
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled
