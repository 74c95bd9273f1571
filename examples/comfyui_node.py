"""A node of ComfyUI: the attention of the model that it is given, in a budget.

Copy this file into ComfyUI's folder ``custom_nodes``. The node is found as "Quorum
attention", and goes between the loader of a model and the sampler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import quorum_attention as qa


class QuorumAttention:
    """The node."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "advanced/model"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (ComfyUI's name)
        """Return what ComfyUI shows of the node."""
        inputs = {
            "model": ("MODEL",),
            "budget": ("STRING", {"default": "2GiB"}),
            "min_tokens": ("INT", {"default": 4096, "min": 2, "max": 1 << 30}),
        }
        return {"required": inputs}

    def patch(self, model: Any, budget: str, min_tokens: int) -> tuple[Any]:
        """Return the model with another attention."""
        patched = model.clone()
        options = patched.model_options.setdefault("transformer_options", {})
        attend = partial(attend_in_budget, budget, min_tokens)
        options["optimized_attention_override"] = attend
        return (patched,)


def attend_in_budget(
    budget: str,
    min_tokens: int,
    former: Any,
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    **named: Any,
) -> Any:
    """Compute a call of ComfyUI's; short ones by ``former``, its own function.

    q, k and v are (batch, tokens, heads * dim); with ``skip_reshape`` (batch, heads,
    tokens, dim). So is the result, by ``skip_output_reshape``.
    """
    if max(q.shape[-2], k.shape[-2]) < min_tokens:
        return former(q, k, v, heads, mask=mask, **named)
    if not named.get("skip_reshape"):
        dim = q.shape[-1] // heads
        kv_heads = k.shape[-1] // dim
        q = q.unflatten(-1, (heads, dim)).transpose(1, 2)
        k = k.unflatten(-1, (kv_heads, dim)).transpose(1, 2)
        v = v.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)  # (batch, 1, queries, keys)
    out = qa.attention(
        q, k, v, mask, scale=named.get("scale"), enable_gqa=True, budget=budget
    )
    return out if named.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


NODE_CLASS_MAPPINGS = {"QuorumAttention": QuorumAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"QuorumAttention": "Quorum attention"}
