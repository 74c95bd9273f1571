"""The step around attention: what else dies at long context, and what to do about it."""

from quorum_attention.recipes.long_context import Summary, long_context
from quorum_attention.recipes.step import (
    ModelShape,
    StepMemory,
    Training,
    read_shape,
    step_memory,
    switch_until_it_fits,
)

__all__ = [
    "ModelShape", "StepMemory", "Summary", "Training", "long_context", "read_shape", "step_memory",
    "switch_until_it_fits",
]  # fmt: skip
