"""What estimates of a model leave out, in words."""

from __future__ import annotations

from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.units import counted


def may_leave_out(shape: ModelShape) -> bool:
    """Whether parts of a model may be missing in its estimates: that these fit does not
    say that the model does."""
    return shape.by_formula or _n_other_layers(shape) > 0


def left_out_of_step(shape: ModelShape) -> list[str]:
    """Say what the estimate of a training step leaves out; nothing if it leaves out
    nothing."""
    sentences = _left_out_of_weights(shape)
    if _n_other_layers(shape):
        sentences.append(
            f"not estimated: {_other_layers(shape)}. What they compute with, and "
            "adapters on them, is not counted: a step may take several times as much"
        )
    return sentences


def left_out_of_prompt(shape: ModelShape) -> list[str]:
    """Say what the estimate of a prompt leaves out; nothing if it leaves out
    nothing."""
    sentences = _left_out_of_weights(shape)
    if not shape.layer_caches:
        sentences.append(
            f"not measured: what layers of {shape.kind} keep in a cache, because "
            "Transformers is not installed, does not know the model, or cannot run it "
            "without memory. Layers with attention are counted with keys and values of "
            "all tokens, others with nothing"
        )
    if _n_other_layers(shape):
        sentences.append(
            f"not estimated: {_other_layers(shape)}. Where long_prompt cannot compute "
            "such a model layer by layer, it computes it in chunks or whole, or "
            "refuses it. What these layers compute with, and how long, is not counted: "
            "a prompt may take several times as much working memory and time"
        )
    return sentences


def _left_out_of_weights(shape: ModelShape) -> list[str]:
    if not shape.by_formula:
        return []
    return [
        f"not measured: weights of {shape.kind} are counted by a formula, because "
        "Transformers is not installed or does not build the model. The formula knows "
        "attention and MLPs, and no other layers"
    ]


def _n_other_layers(shape: ModelShape) -> int:
    return len(shape.other_layers) + shape.hybrid_layers


def _other_layers(shape: ModelShape) -> str:
    n_other = _n_other_layers(shape)
    return (
        f"{n_other} of {counted(shape.layers, 'layer')} of {shape.kind} without "
        "attention, or with more than attention (recurrences, convolutions, MLPs alone)"
    )
