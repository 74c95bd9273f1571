"""One measurement: what is asked of a child process, and what it answers. Plain JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK = "ok"
OUT_OF_MEMORY = "out of memory"
UNSUPPORTED = "not supported"
FAILED = "failed"


@dataclass(frozen=True)
class Spec:
    """What to measure, in a process of its own.

    Attributes:
        method: a name of ``methods.METHODS``.
        tokens, heads, kv_heads, head_dim, dtype, is_causal: the call; batch 1, dtype by name.
        backward: forward and backward, else forward alone.
        device: "cuda" or "cpu".
        budget_bytes: a real limit of the allocator beyond what the inputs take, told to ours as
            well; None is none.
        repeats: timed runs after one that is not; 0 only looks whether it completes.
        seed: of the inputs.
        draws: how often errors against float64 are measured, with inputs of their own; 0 is not.
        itself: ``method`` is a kernel of ``itself.KERNELS``, and it is compared with itself
            recovered, ``draws`` times.
    """

    method: str
    tokens: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float16"
    is_causal: bool = True
    backward: bool = False
    device: str = "cuda"
    budget_bytes: int | None = None
    repeats: int = 3
    seed: int = 0
    draws: int = 0
    itself: bool = False


@dataclass
class Answer:
    """What happened.

    Attributes:
        status: OK, OUT_OF_MEMORY, UNSUPPORTED or FAILED; ``reason`` says more.
        stage: what was being done when it ended.
        forward_seconds, backward_seconds: of every timed run.
        first_seconds: of the first, untimed run, both passes together.
        peak_bytes: most device memory beyond the inputs that lie there (CPU: of the process).
        input_bytes: of inputs that lie on the device.
        errors: by result ("out", "grad_query", ...) the relative error of every draw.
        differences: by result the largest and the mean difference of every draw, between a kernel
            and itself recovered.
        report: ours' own account of the last run.
    """

    status: str = OK
    reason: str = ""
    stage: str = ""
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    first_seconds: float | None = None
    peak_bytes: int | None = None
    input_bytes: int = 0
    errors: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there are figures."""
        return self.status == OK
