"""Tiny models of Transformers with random weights, and an attention to hold them
against.

Import after ``pytest.importorskip("transformers")``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from quorum_attention.integrations.transformers import register

VOCABULARY, LAYERS = 96, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
# Experts, one of them shared, and layers with states of a recurrence.
LINEAR_EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXED = ["sliding_attention", "full_attention"]
SHARP = ("q_proj", "k_proj", "query", "key", "Wqkv")  # weights that make scores
# Name of a configuration, and what it is about.
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 3.0, "layer_types": MIXED},
    "gemma3_text": {"sliding_window": 9, "layer_types": MIXED},
    "qwen3": {"num_key_value_heads": 1},
    "gpt_oss": {"sliding_window": 9, "layer_types": MIXED, **EXPERTS},
    "llama4_text": {
        "attention_chunk_size": 12, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
        **EXPERTS,
    },
    "phi": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 512},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 512},
    "modernbert": {
        "head_dim": 8,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
    },
}


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The formula, in the dtype of its inputs, on a boolean mask of all pairs."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), -1)
    else:
        scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(empty, 0.0)
    return (weights @ value).transpose(1, 2), None


def exact_mask(**asked: Any) -> torch.Tensor:
    """All pairs, always."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor = sdpa_mask(**{**asked, **skips})
    return mask


def register_all() -> None:
    """ "exact", and "quorum" uncut ("quorum"), at depth 1 ("cut_once") and 2
    ("cut_twice")."""
    transformers.AttentionInterface.register("exact", exact_attention)
    AttentionMaskInterface.register("exact", exact_mask)
    register(min_tokens=0)
    register("cut_once", depth=1)
    register("cut_twice", depth=2)


def tiny(kind: str, change: dict[str, Any] | None = None, auto: Any = None) -> Any:
    """A model of that kind in float32, with scores that differ from token to token."""
    own = {**DECODERS, **ENCODERS}[kind]
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **own, **(change or {})})
    config.use_cache = False
    auto = auto or (
        transformers.AutoModelForCausalLM
        if kind in DECODERS
        else transformers.AutoModelForMaskedLM
    )
    model = auto.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_(0.0, 1.0)
            elif weight.dim() > 1 and any(part in name for part in SHARP):
                weight.mul_(8.0)
    return model.eval()


def attended(model: Any, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of ``model`` whose attention has that name."""
    other = copy.deepcopy(model).to(dtype)
    other.set_attn_implementation(name)
    return other


def logits_and_gradients(
    model: Any, ids: torch.Tensor, keep: torch.Tensor | None = None, **asked: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, 0 where tokens are not kept (padding says nothing); and gradients of
    their squares."""
    model.zero_grad()
    logits = model(input_ids=ids, **asked).logits
    kept = logits if keep is None else logits.masked_fill(~keep[..., None], 0.0)
    # Weighted, so that no gradient is the sum of things that cancel.
    weights = torch.linspace(
        0.5, 1.5, kept.numel(), dtype=torch.float64, device=kept.device
    )
    (kept.double().square() * weights.view(kept.shape)).mean().backward()
    grads = {
        n: p.grad.detach().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return kept.detach(), grads


def some_ids(batch: int = 2, tokens: int = 41, device: str = "cpu") -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, tokens), device=device)


def padding(ids: torch.Tensor) -> torch.Tensor:
    """One row padded on the left, one on the right."""
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, -5:] = 0
    return mask


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value there is."""
    largest = exact.abs().max().item()
    return (found.double() - exact).abs().max().item() / max(largest, 1e-30)


def assert_as_close_as_eager(
    model: Any,
    name: str,
    ids: torch.Tensor,
    keep: torch.Tensor | None = None,
    **asked: Any,
) -> None:
    """Logits and all gradients: no further from float64 than eager's own, or than
    rounding."""
    exact = logits_and_gradients(
        attended(model, "exact", torch.float64), ids, keep, **asked
    )
    eager = logits_and_gradients(attended(model, "eager"), ids, keep, **asked)
    ours = logits_and_gradients(attended(model, name), ids, keep, **asked)
    assert ours[1].keys() == exact[1].keys()
    assert distance(ours[0], exact[0]) <= max(3 * distance(eager[0], exact[0]), 2e-6)
    for weight, gradient in exact[1].items():
        room = max(3 * distance(eager[1][weight], gradient), 2e-5)
        if gradient.abs().max() > 1e-9:
            assert distance(ours[1][weight], gradient) <= room, weight


def assert_logits_and_gradients(kind: str, name: str, ids: torch.Tensor) -> None:
    """Of a model of that kind: of two texts, of padded ones, and of packed
    documents."""
    model, mask = tiny(kind).to(ids.device), padding(ids)
    assert_as_close_as_eager(model, name, ids)
    assert_as_close_as_eager(model, name, ids, mask.bool(), attention_mask=mask)
    if kind in DECODERS and kind != "opt":
        lengths = 17, 1, ids.shape[1] - 18
        positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
        assert_as_close_as_eager(
            model, name, ids, position_ids=positions.to(ids.device)
        )
