"""What a model hands its attention function beyond tensors: honoured, without effect, or refused.

Models pass on whatever their ``forward`` was given, so there is more than an attention needs. What
is on neither list here is refused: it may change results.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

# Of these the attention's result is the same, whatever they are: hints for other kernels, what is
# in the mask already (positions, lengths of documents), and what a model's other parts read.
WITHOUT_EFFECT = frozenset({
    "cache_position", "deterministic", "ignore_index", "kernel_options", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "shift_labels", "seq_idx", "use_cache",
})  # fmt: skip
_WHY = {
    "output_attentions": "the weights are never there at once; use attn_implementation='eager'",
    "cache": "continuous batching with a paged cache is not supported; use 'sdpa'",
    "head_mask": "heads cannot be weighted after the softmax; use attn_implementation='eager'",
    "indices": "keys chosen token by token are not supported; use attn_implementation='eager'",
    "block_indices": "blocks chosen query by query are not supported; use 'eager'",
    "sinks": "sinks that differ between tokens are not supported; use 'eager'",
}


def refuse(others: Mapping[str, Any], module: Any) -> None:
    """Nothing, if no keyword is among ``others`` that may change a result, nor weights are asked
    for behind the attention's back: Transformers collects those that layers return, and some
    models (GPT-2, OPT) do not tell their attention.

    Raises:
        NotImplementedError: names the keyword, and what to use instead.
    """
    for name, value in others.items():
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        why = _WHY.get(name, "it is not known whether it changes results")
        raise NotImplementedError(
            f"quorum attention does not honour {name!r}, which {type(module).__name__} hands to "
            f"its attention: {why}"
        )
    collected = None if torch.compiler.is_compiling() else _collector().get()
    if collected is not None and any("attentions" in name for name in collected):
        raise NotImplementedError(
            f"quorum attention does not honour 'output_attentions', which was asked of the model "
            f"of {type(module).__name__}: {_WHY['output_attentions']}"
        )


@cache
def _collector() -> Any:
    """Where Transformers has the names of what it collects of layers, here and now; an empty one in
    versions that have none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return ContextVar("collected", default=None)
    return _active_collector


__all__ = ["WITHOUT_EFFECT", "refuse"]
