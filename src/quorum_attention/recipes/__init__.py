"""The step around attention: what else dies at long context, and what to do about it."""

from quorum_attention.recipes.changes import Summary
from quorum_attention.recipes.config import ModelShape, read_shape
from quorum_attention.recipes.long_context import long_context
from quorum_attention.recipes.step import StepMemory, Training, step_memory, switch_until_it_fits

__all__ = [
    "ModelShape", "StepMemory", "Summary", "Training", "long_context", "read_shape", "step_memory",
    "switch_until_it_fits",
]  # fmt: skip
