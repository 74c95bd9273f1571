"""The model around attention: long training steps, long prompts, and what else dies
there."""

from quorum_attention.recipes.long_context import LongContext, long_context
from quorum_attention.recipes.long_prompt import long_prompt, undo_long_prompt
from quorum_attention.recipes.model_shape import ModelShape, read_shape
from quorum_attention.recipes.pieces import (
    checkpoint_layers,
    chunk_loss,
    fuse_norms,
    tile_mlps,
)
from quorum_attention.recipes.remedies import longest_that_fits, switch_until_it_fits
from quorum_attention.recipes.step_estimate import StepMemory, step_memory
from quorum_attention.recipes.training import Training

__all__ = [
    "LongContext",
    "ModelShape",
    "StepMemory",
    "Training",
    "checkpoint_layers",
    "chunk_loss",
    "fuse_norms",
    "long_context",
    "long_prompt",
    "longest_that_fits",
    "read_shape",
    "step_memory",
    "switch_until_it_fits",
    "tile_mlps",
    "undo_long_prompt",
]
