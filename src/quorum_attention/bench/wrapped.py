"""Other kernels recovered: what that changes, and what it costs (the paper's appendix)."""

from __future__ import annotations

from statistics import mean

from quorum_attention.bench.itself import INPUTS_TIMES, KERNELS, RESULTS
from quorum_attention.bench.methods import WRAPPED
from quorum_attention.bench.runner import Runner
from quorum_attention.bench.search import sweep
from quorum_attention.bench.settings import Section, Settings, ratio, seconds, short, word
from quorum_attention.bench.spec import Answer
from quorum_attention.sizes import format_bytes


def run(settings: Settings, runner: Runner) -> list[Section]:
    """Output preservation of dense and LongNet, and their recovery under the capped budget."""
    recovered = [_recovery(settings, runner, backward) for backward in settings.passes]
    return [_preservation(settings, runner), *recovered]


def _preservation(settings: Settings, runner: Runner) -> Section:
    tokens = 2 * settings.accuracy_tokens if settings.device == "cpu" else 4096
    draws = settings.draws if settings.quick else 2 * settings.draws
    rows = []
    for name in KERNELS:
        for dtype in (settings.dtype,) if settings.quick else ("float32", "bfloat16", "float16"):
            spec = settings.spec(
                name, tokens, dtype=dtype, backward=True, draws=draws, repeats=0, itself=True
            )
            answer = runner.measure(spec, "wrapped")
            rows.append([name, dtype, *(_apart(answer, result) for result in RESULTS)])
    text = (
        f"{short(tokens)} tokens, causal, inputs times {INPUTS_TIMES}, {draws} draws, depths 1 "
        "and 2: the largest absolute difference between a kernel run as it is and the same "
        "recovered, and the mean one."
    )
    return Section("wrapped", "Recovered against itself", text, ["kernel", "dtype", *RESULTS], rows)


def _apart(answer: Answer, result: str) -> str:
    if result not in answer.differences:
        return word(answer)
    largest, average = zip(*answer.differences[result], strict=True)
    return f"{max(largest):.1e}, {mean(average):.1e}"


def _recovery(settings: Settings, runner: Runner, backward: bool) -> Section:
    names = [method.name for method in WRAPPED]
    lengths = settings.wrapped_lengths()
    answers = sweep(
        settings, runner, "wrapped", names, lengths, backward=backward,
        budget_bytes=settings.budget_bytes,
    )  # fmt: skip
    rows = [
        [short(tokens), *(_cell(answers, name, tokens, backward) for name in names)]
        for tokens in lengths
    ]
    kind = "forward+backward" if backward else "forward"
    text = (
        f"Within {format_bytes(settings.budget_bytes)} beyond the inputs: seconds (median of "
        f"{settings.repeats}), ratio to the kernel as it is, peak memory, and of that time the "
        "share that recovering from failures took (adaptation). oom: out of memory."
    )
    return Section(
        f"wrapped-{'both' if backward else 'forward'}", f"Kernels recovered, {kind}", text,
        ["tokens", *names], rows,
    )  # fmt: skip


def _cell(answers: dict[tuple[str, int], Answer], name: str, tokens: int, backward: bool) -> str:
    answer = answers.get((name, tokens))
    if answer is None:
        return ""
    spent = seconds(answer, backward)
    if spent is None:
        return word(answer)
    text = f"{spent:.4g}"
    if name.startswith("recovered-"):
        plain = answers.get((name.removeprefix("recovered-"), tokens))
        text += f" ({ratio(spent, None if plain is None else seconds(plain, backward))}x)"
        passes = [part for part in answer.report.values() if part]
        total = sum(part["seconds"] for part in passes)
        lost = sum(part["recovery_seconds"] for part in passes)
        text += f", adaptation {lost / total if total else 0.0:.0%}"
    return f"{text}, {format_bytes(answer.peak_bytes or 0)}"
