"""How a model is trained: a record that the estimates of a step take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.keywords import helps_with_fields
from quorum_attention.recipes.switches import SWITCHES, TILES
from quorum_attention.units import check_budget

Optimizer = Literal["none", "adamw", "adamw-fp32"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


@helps_with_fields
@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        tokens: tokens of a sequence.
        batch: the number of sequences in a step.
        dtype: dtype of weights and activations.
        optimizer: "none", "adamw" (two states in the weights' dtype), "adamw-fp32" (two
            states and the weights in float32).
        lora: rank of LoRA's adapters, which all linear layers get. Then all other
            weights are frozen. None: all weights are trained.
        budget: the budget of one call of quorum attention, which includes its output or
            its gradients, as for ``register``; None: no limit.
        device: the kind of device that attention is planned for.
        on: the changes that are switched on.
    """

    tokens: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    optimizer: Optimizer = "adamw"
    lora: int | None = None
    budget: int | None = None
    device: str = GPU
    on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number(self.tokens, "tokens", 1)
        whole_number(self.batch, "batch", 1)
        one_of(self.optimizer, "optimizer", OPTIMIZERS)
        if self.budget is not None:
            check_budget(whole_number(self.budget, "budget", 0))
        if self.lora is not None:
            whole_number(self.lora, "lora", 1)
        for name in self.on:
            one_of(name, "on", (*SWITCHES, TILES))

    @property
    def rows(self) -> int:
        """The tokens of all sequences of a step."""
        return self.tokens * self.batch

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of ``dtype``."""
        return self.dtype.itemsize

    @property
    def has_frozen_weights(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora is not None

    def has(self, switch: str) -> bool:
        """Whether a change is switched on."""
        return switch in self.on
