"""One measurement: the question to a child process, and its answer; both are sent as JSON."""

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
        backward: whether to measure forward and backward, or the forward alone.
        device: "cuda" or "cpu".
        budget_bytes: limit of the allocator beyond the inputs, of which our methods are told;
            None is no limit.
        repeats: timed runs after a first, untimed one; 0 only tests whether the call completes.
        seed: random seed of the inputs.
        draws: how often errors against float64 are measured, each time with other inputs.
        itself: whether ``method`` is a kernel of ``itself.KERNELS``, which is compared with itself
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
    """The outcome of a measurement.

    Attributes:
        status: OK, OUT_OF_MEMORY, UNSUPPORTED or FAILED; ``reason`` says more.
        stage: what was being done when it failed.
        forward_seconds, backward_seconds: seconds of every timed run.
        first_seconds: seconds of the first, untimed run, all passes together.
        peak_bytes: most device memory beyond the inputs on the device (CPU: of the process).
        input_bytes: bytes of the inputs on the device.
        errors: by result ("out", "grad_query", ...), the relative error of every draw.
        differences: by result, the largest and the mean difference of every draw and depth, between
            a kernel and itself recovered.
        report: the method's own report of the last run.
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
        """Whether it was measured."""
        return self.status == OK
