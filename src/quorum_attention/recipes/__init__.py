"""The step around attention: what else dies at long context, and what to do about it."""

from quorum_attention.recipes.config import ModelShape, read_shape
from quorum_attention.recipes.step import StepMemory, Training, step_memory, switch_until_it_fits

__all__ = [
    "ModelShape", "StepMemory", "Training", "read_shape", "step_memory", "switch_until_it_fits",
]  # fmt: skip
