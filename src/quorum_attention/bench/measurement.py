"""A measurement in a process of its own, as data: what to measure, and what came of
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quorum_attention.plain_types import JsonObject
from quorum_attention.units import format_bytes

OK = "ok"
OUT_OF_MEMORY = "out of memory"
UNSUPPORTED = "not supported"
FAILED = "failed"


@dataclass(frozen=True)
class Spec:
    """The call and the method to measure.

    Attributes:
        method: a name of ``METHODS``.
        tokens, heads, kv_heads, head_dim, dtype, is_causal: a call on random inputs;
            batch 1.
        backward: whether gradients are computed as well.
        limit_bytes: enforced limit beyond the start (CPU: of the process, GPU: of the
            allocator).
        budget_bytes: what our methods are told.
        repeats: timed calls after a first one.
        patience: no further call after so many seconds.
        draws: how often errors against float64 are measured, each time with other
            inputs.
        inputs: a safetensors file with query, key and value in place of random ones.
        check: whether sampled rows of our results are compared with float64.
        progress: whether to show a progress bar.
    """

    method: str
    tokens: int = 0
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float16"
    is_causal: bool = True
    backward: bool = False
    device: str = "cuda"
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    repeats: int = 3
    patience: float = float("inf")
    draws: int = 0
    inputs: str | None = None
    check: bool = False
    progress: bool = False


@dataclass
class Outcome:
    """The outcome of a measurement.

    Attributes:
        status: OK, OUT_OF_MEMORY, UNSUPPORTED or FAILED; ``reason`` says more.
        stage: what was being done when it failed.
        first_seconds: of the first call: forward, and backward if there is one.
        forward_seconds, backward_seconds: of the calls after it.
        peak_bytes: most memory beyond the inputs on the device (CPU: of the process).
        errors: by result ("out", "grad_query", ...), the relative error of every draw.
        report: our method's own report.
    """

    status: str = OK
    reason: str = ""
    stage: str = ""
    first_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    errors: dict[str, list[float]] = field(default_factory=dict)
    report: JsonObject = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == OK

    def call_seconds(self) -> list[float]:
        """The seconds of each call after the first: its forward and, if there is one,
        its backward."""
        backward_seconds = self.backward_seconds or [0.0] * len(self.forward_seconds)
        return [
            forward + backward
            for forward, backward in zip(
                self.forward_seconds, backward_seconds, strict=False
            )
        ]

    @property
    def memory(self) -> str:
        """The peak of memory, in words."""
        return (
            "not measured" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        )
