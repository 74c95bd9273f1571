"""The paper's experiments: what each measures, and the tables that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from quorum_attention.bench.child import FAILED, OUT_OF_MEMORY, Answer, Spec
from quorum_attention.bench.methods import INPUTS_TIMES, ITSELF, RESULTS, WRAPPED, reference
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.device.clock import STAGES
from quorum_attention.sizes import format_bytes

Measure = Callable[[str, Spec], Answer]


@dataclass(frozen=True)
class Settings:
    """The choices of one ``bench`` run.

    Attributes:
        device, heads, kv_heads, head_dim, dtype: sizes of every call; causal, batch 1.
        methods: names, in the order of the tables.
        min_tokens, max_tokens: shortest and longest call of a sweep, which doubles its length.
        accuracy_tokens: length of the calls of the accuracy tables.
        budget_bytes: the capped budget of ``recovery``, ``boundary`` and ``wrapped``.
        repeats: timed runs of a measurement.
        draws: number of random inputs for the accuracy tables.
        method_seconds: a sweep of a method ends if its next length is expected to take longer.
        quick: whether to measure fewer passes, dtypes, lengths and steps.
    """

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    methods: tuple[str, ...]
    min_tokens: int
    max_tokens: int
    accuracy_tokens: int
    budget_bytes: int
    repeats: int
    draws: int
    method_seconds: float
    quick: bool = False

    def spec(self, method: str, tokens: int, limit: int | None = None, **others: Any) -> Spec:
        """A measurement of ``method``, with ``limit`` bytes beyond its inputs."""
        # The limit also counts memory that the allocator holds but cannot use.
        budget = None if limit is None else limit * (6 if self.device == "cpu" else 9) // 10
        fields: dict[str, Any] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "dtype": self.dtype, "device": self.device, "repeats": self.repeats,
            "limit_bytes": limit, "budget_bytes": budget, **others,
        }  # fmt: skip
        return Spec(method, tokens, **fields)

    @property
    def passes(self) -> dict[bool, str]:
        """By whether gradients are computed, what the call is called."""
        both = {True: "forward+backward"}
        return both if self.quick else {False: "forward", **both}

    def lengths(self) -> list[int]:
        """The lengths of a sweep."""
        found = [self.min_tokens]
        while found[-1] * 2 <= self.max_tokens:
            found.append(found[-1] * 2)
        return found


@dataclass
class Section:
    """A table of the report; ``lines`` are a figure's: by label, tokens and what is drawn."""

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    lines: dict[str, list[tuple[int, float]]] | None = None


def accuracy(settings: Settings, measure: Measure) -> list[Section]:
    """Forward and backward errors of every method in both 16-bit dtypes (fp32 on a CPU too)."""
    dtypes = ["float16", "bfloat16", *(["float32"] if settings.device == "cpu" else [])]
    dtypes = [settings.dtype] if settings.quick else dtypes
    rows = []
    for method in settings.methods:
        cells = [method]
        for dtype in dtypes:
            spec = settings.spec(
                method, settings.accuracy_tokens, dtype=dtype, backward=True,
                draws=settings.draws, repeats=0,
            )  # fmt: skip
            answer = measure("accuracy", spec)
            errors = [mean(answer.errors.get(name) or [0.0]) for name in RESULTS]
            shown = [f"{e:.2e}" for e in (errors[0], mean(errors[1:]), *errors[1:])]
            cells += shown if answer.ok else [status_label(answer)] * 5
        rows.append(cells)
    text = (
        f"{short(settings.accuracy_tokens)} tokens, relative error (norm of the difference over "
        f"the norm) against float64, mean of {settings.draws} draws. gradients: mean of the three."
    )
    names = ("out", "gradients", "dQ", "dK", "dV")
    columns = ["method", *(f"{name} {dtype}" for dtype in dtypes for name in names)]
    return [Section("Accuracy against float64", text, columns, rows)]


def cost(settings: Settings, measure: Measure) -> list[Section]:
    """Time and memory over sequence length, forward and forward+backward."""
    against, found = reference(settings.device), []
    for backward, name in settings.passes.items():
        answers = sweep(settings, measure, "cost", settings.methods, backward=backward)
        rows, lines = [], dict[str, list[tuple[int, float]]]()
        for tokens in settings.lengths():
            cells = [short(tokens)]
            other = seconds(answers.get((against, tokens)))
            for method in settings.methods:
                answer = answers.get((method, tokens))
                spent = seconds(answer)
                cells.append("" if answer is None else status_label(answer))
                if answer is not None and spent is not None:
                    memory = format_bytes((answer.peak_bytes or 0) + answer.input_bytes)
                    cells[-1] = f"{spent:.4g} ({ratio(spent, other)}x, {memory})"
                    if other:
                        lines.setdefault(method, []).append((tokens, spent / other))
            rows.append(cells)
        text = (
            f"Seconds (median of {settings.repeats}), time over {against}'s, and peak device "
            f"memory with the inputs that are there. oom: out of memory; empty: not run, because a "
            f"shorter length failed or this one would take too long."
        )
        found.append(Section(f"Cost, {name}", text, ["tokens", *settings.methods], rows, lines))
    return found


def recovery(settings: Settings, measure: Measure) -> list[Section]:
    """The reference's longest forward within the budget, and calls beyond it."""
    against, title = reference(settings.device), "Recovery at the memory boundary"
    limit = settings.budget_bytes
    boundary = longest(settings, measure, "recovery", against, backward=False)
    if not boundary:
        text = f"{against} does not run at {short(settings.min_tokens)} tokens in the budget."
        return [Section(title, text, [], [])]
    names = [against, *(m for m in ("quorum", "stream-cqsa") if m in settings.methods)]
    lengths = [boundary * factor for factor in (1, 2, 4, 8)]
    rows = []
    for tokens in [n for n in lengths if n <= settings.max_tokens] or lengths[:1]:
        cells = [short(tokens)]
        for method in names:
            spec = settings.spec(method, tokens, limit, repeats=1, backward=True)
            answer = measure("recovery", spec)
            spent, times = seconds(answer), 0
            for part in answer.report.values():
                times += len(part.get("recoveries", [])) if part else 0
            again = f", recovered {times}x" if times else ""
            peak = format_bytes(answer.peak_bytes or 0)
            label = status_label(answer)
            cells.append(label if spent is None else f"{spent:.4g} s, {peak}{again}")
        rows.append(cells)
    text = (
        f"Forward and backward with {format_bytes(limit)} beyond the inputs, enforced. The longest "
        f"forward of {against} in it has {short(boundary)} tokens. Seconds, peak memory, and how "
        f"often ours recovered from a failure."
    )
    return [Section(title, text, ["tokens", *names], rows)]


def stages(settings: Settings, measure: Measure) -> list[Section]:
    """Where our method spends its time, as planned and at depth 1."""
    rows: list[list[str]] = []
    for method in ("quorum", "quorum-depth-1"):
        # The planner gets a budget: without one, the call would have no stages.
        limit = settings.budget_bytes if method == "quorum" else None
        spec = settings.spec(method, settings.max_tokens, limit, backward=True, repeats=1)
        answer = measure("stages", spec)
        for name in ("forward", "backward"):
            part: dict[str, Any] = answer.report.get(name) or {}
            cells = [status_label(answer), *[""] * (len(STAGES) + 1)]
            if answer.ok and part.get("stages"):
                spent = (part["seconds"], *(part["stages"][stage] for stage in STAGES))
                hidden = part.get("overlap")
                cells = [*map("{:.4g}".format, spent), "-" if hidden is None else f"{hidden:.0%}"]
            rows.append([f"{method} {name}", *cells])
    text = (
        f"{short(settings.max_tokens)} tokens: seconds of the call, seconds of each stage on the "
        f"device, and the share of the transfers that other work hides."
    )
    columns = ["pass", "wall", *STAGES, "transfers hidden"]
    return [Section("Stage breakdown", text, columns, rows)]


def census(settings: Settings, measure: Measure) -> list[Section]:
    """Masked, clear and mixed tiles of 128 x 128 at c = 7, causal, both layouts."""
    rows = []
    for tokens in (65_536, 262_144, 1_048_576):
        for levels in ((7,), (7, 7)):
            cells = [short(tokens), str(len(levels))]
            for layout in ("balanced", "aligned"):
                found = Decomposition(tokens, levels, layout).census(True)
                shares = (found.masked, found.clear, found.mixed)
                cells.append(" / ".join(f"{100 * share:.2f}" for share in shares))
            rows.append(cells)
    text = "Masked / clear / mixed tiles of all tasks in %. The paper's layout is balanced."
    return [Section("Tile census", text, ["tokens", "depth", "balanced", "aligned"], rows)]


def boundary(settings: Settings, measure: Measure) -> list[Section]:
    """The longest call of every method in the budget."""
    rows = []
    for method in settings.methods:
        cells = [method]
        for backward in settings.passes:
            tokens = longest(settings, measure, "boundary", method, backward=backward)
            beyond = 2 * tokens > settings.max_tokens and tokens in settings.lengths()
            shown = f"< {short(settings.min_tokens)}" if not tokens else short(tokens)
            cells.append(f">= {shown}" if tokens and beyond else shown)
        rows.append(cells)
    text = (
        f"The longest call that completes with {format_bytes(settings.budget_bytes)} beyond its "
        f"inputs, enforced; tried up to {short(settings.max_tokens)}."
    )
    columns = ["method", *settings.passes.values()]
    return [Section("Boundary of a capped budget", text, columns, rows)]


def wrapped(settings: Settings, measure: Measure) -> list[Section]:
    """Dense and LongNet kernels recovered: what that changes, and what it costs in the budget."""
    tokens = 2 * settings.accuracy_tokens if settings.device == "cpu" else 4096
    draws = settings.draws if settings.quick else 2 * settings.draws
    rows = []
    for name in ITSELF:
        for dtype in (settings.dtype,) if settings.quick else ("float32", "bfloat16", "float16"):
            answer = measure("wrapped", settings.spec(
                name, tokens, dtype=dtype, backward=True, draws=draws, repeats=0, itself=True
            ))  # fmt: skip
            cells = []
            for result in RESULTS:
                apart = answer.differences.get(result)
                largest, average = zip(*apart, strict=True) if apart else ((), ())
                numbers = f"{max(largest, default=0):.1e}, {mean(average or [0]):.1e}"
                cells.append(numbers if apart else status_label(answer))
            rows.append([name, dtype, *cells])
    text = (
        f"{short(tokens)} tokens, causal, inputs times {INPUTS_TIMES}, {draws} draws, depths 1 and "
        "2: the largest and the mean absolute difference between a kernel and itself recovered."
    )
    columns = ["kernel", "dtype", "out", "dQ", "dK", "dV"]
    found = [Section("Recovered against itself", text, columns, rows)]
    lengths = [min(4096, settings.max_tokens)] if settings.quick else settings.lengths()
    for backward, kind in settings.passes.items():
        answers = sweep(
            settings, measure, "wrapped", list(WRAPPED), lengths, backward=backward,
            limit=settings.budget_bytes,
        )  # fmt: skip
        rows = [[short(n), *(_wrapped_cell(answers, name, n) for name in WRAPPED)] for n in lengths]
        text = (
            f"With {format_bytes(settings.budget_bytes)} beyond the inputs: seconds, time over the "
            "kernel's as it is, peak memory, and the share of the time that recovering from "
            "failures took (adaptation)."
        )
        found.append(Section(f"Kernels recovered, {kind}", text, ["tokens", *WRAPPED], rows))
    return found


def _wrapped_cell(answers: dict[tuple[str, int], Answer], name: str, tokens: int) -> str:
    answer = answers.get((name, tokens))
    spent = seconds(answer)
    if answer is None or spent is None:
        return "" if answer is None else status_label(answer)
    text = f"{spent:.4g}"
    if name.startswith("recovered-"):
        plain = seconds(answers.get((name.removeprefix("recovered-"), tokens)))
        passes = [part for part in answer.report.values() if part]
        total = sum(part["seconds"] for part in passes)
        lost = sum(part["recovery_seconds"] for part in passes)
        text += f" ({ratio(spent, plain)}x), adaptation {lost / total if total else 0.0:.0%}"
    return f"{text}, {format_bytes(answer.peak_bytes or 0)}"


EXPERIMENTS: dict[str, Callable[[Settings, Measure], list[Section]]] = {
    "accuracy": accuracy, "cost": cost, "recovery": recovery, "stages": stages, "census": census,
    "boundary": boundary, "wrapped": wrapped,
}  # fmt: skip


def sweep(
    settings: Settings, measure: Measure, experiment: str, methods: Iterable[str],
    lengths: Sequence[int] = (), **others: Any,
) -> dict[tuple[str, int], Answer]:  # fmt: skip
    """Answers by (method, tokens). A method ends at its first length that fails, or if its next one
    is expected to take longer than ``settings.method_seconds``."""
    answers: dict[tuple[str, int], Answer] = {}
    for method in methods:
        expected = 0.0
        for tokens in lengths or settings.lengths():
            if expected > settings.method_seconds:
                break
            answer = measure(experiment, settings.spec(method, tokens, **others))
            answers[method, tokens] = answer
            if not answer.ok:
                break
            # Work grows with the square of the length.
            expected = 4 * (settings.repeats + 1) * (seconds(answer) or 0.0)
    return answers


def longest(
    settings: Settings, measure: Measure, experiment: str, method: str, *, backward: bool
) -> int:
    """Tokens of the longest call of ``method`` in the budget: doubled until a call fails; then two
    halvings of the interval (none if ``settings.quick``). 0 if the shortest call fails."""

    def completes(tokens: int) -> bool:
        limit = settings.budget_bytes
        spec = settings.spec(method, tokens, limit, backward=backward, repeats=0)
        return measure(experiment, spec).ok

    best, tokens = 0, settings.min_tokens
    while tokens <= settings.max_tokens and completes(tokens):
        best, tokens = tokens, 2 * tokens
    if best == 0 or tokens > settings.max_tokens or settings.quick:
        return best
    for step in (best // 2, best // 4):
        best += step if completes(best + step) else 0
    return best


def seconds(answer: Answer | None) -> float | None:
    """Median seconds of a measurement, both passes together; None if there is none."""
    if answer is None or not answer.ok or not answer.forward_seconds:
        return None
    backward = answer.backward_seconds or [0.0] * len(answer.forward_seconds)
    return median(a + b for a, b in zip(answer.forward_seconds, backward, strict=True))


def status_label(answer: Answer) -> str:
    """A table's cell for an answer without numbers."""
    if answer.status == OUT_OF_MEMORY:
        return "oom"
    return "failed" if answer.status == FAILED else "-"


def ratio(a: float, b: float | None) -> str:
    """A table's cell for ``a / b``."""
    return f"{a / b:.3g}" if b else "-"


def short(tokens: int) -> str:
    """8192 as 8K, 1048576 as 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
