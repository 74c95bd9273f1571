"""The page of results: the paper's tables beside ours, from files alone.

    python benchmarks/tables.py            writes docs/results.md
    python benchmarks/tables.py --check    fails where the page is not what the files say

The paper's figures are in docs/data/paper.json, ours in benchmarks/results; the census is counted
anew. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
PAPER: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "paper.json").read_text("utf-8"))
NOT_MEASURED = "Ours: not measured yet.\n"
GRADIENTS = ("grad_query", "grad_key", "grad_value")
METHODS = {
    "flash": "FlashAttention-2 (torch)", "cudnn": "cuDNN (torch)",
    "efficient": "memory-efficient (torch)", "quorum": "ours, as planned",
    "quorum-device": "ours, inputs on the device", "quorum-depth-1": "ours, depth 1",
    "quorum-depth-2": "ours, depth 2",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: python benchmarks/tables.py")


def page() -> str:
    """The whole page."""
    sections = (
        head(), accuracy(), long_accuracy(), cost(), recovery(), budgets(), census(), wrapped(),
        more(),
    )  # fmt: skip
    return "\n".join(sections)


def loaded(name: str) -> Any:
    """A file of raw results; None if there is none."""
    path = RESULTS / name
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def machine(about: dict[str, Any], name: str) -> str:
    """Where figures come from, as words in brackets."""
    cudnn = f", cuDNN {about['cudnn']}" if "cudnn" in about else ""
    where = f"{about['device']}, torch {about['torch']}{cudnn}, {about['date']}"
    return f"{where}; raw: `benchmarks/results/{name}`"


def head() -> str:
    return f"""# The paper's tables and ours

<!-- Written by benchmarks/tables.py from docs/data/paper.json and benchmarks/results: do not edit. -->

The paper: *{PAPER["source"].split(";")[0]}*. Its figures are of {PAPER["machine"]}. Ratios carry over between
machines, seconds do not. Ours are of the machine that each table names, fp16, causal, unless it says otherwise.
"theirs" is the method of the paper's authors, as they measured it. How to repeat ours: [bench.md](bench.md), and
the scripts that a table names.
"""


def accuracy() -> str:
    theirs = PAPER["accuracy"]
    rows = [
        [f"paper: {name}", *(f"{error:.3e}" for error in errors)]
        for name, errors in theirs["rows"].items()
    ]
    name = "h200-bench-accuracy.json"
    found = loaded(name)
    note = NOT_MEASURED
    if found is not None:
        note = f"Ours: {machine(found['about'], name)}.\n"
        methods = list(dict.fromkeys(m["spec"]["method"] for m in found["measurements"]))
        rows += [[f"here: {METHODS.get(m, m)}", *errors_of(found, m)] for m in methods]
    return f"""## Accuracy at {theirs["tokens"]:,} tokens

Relative error against float64 on the same inputs (norm of the difference over the norm), mean of
{theirs["draws"]} draws; backward: mean of the three gradients. Less is better. Theirs returns float32. Ours returns the inputs' 16 bits here, as torch's kernels do; cut by force (such a call
fits uncut, which is what is planned), it merges partial results that those kernels have rounded. {note}
{table(["", *theirs["columns"]], rows)}"""


def errors_of(found: Any, method: str) -> list[str]:
    """Forward in both dtypes, then backward in both."""
    cells = []
    for names in (("out",), GRADIENTS):
        for dtype in ("float16", "bfloat16"):
            answers = [
                m["answer"]["errors"]
                for m in found["measurements"]
                if m["spec"]["method"] == method and m["spec"]["dtype"] == dtype
            ]
            errors = answers[0] if answers else {}
            complete = bool(errors) and all(errors.get(name) for name in names)
            text = f"{mean(mean(errors[n]) for n in names):.3e}" if complete else "-"
            cells.append(text)
    return cells


def long_accuracy() -> str:
    name = "h200-accuracy-1048576.json"
    found = loaded(name)
    if found is None:
        return ""
    words = {"last": "of the last 8,192", "random": "from anywhere"}
    rows = [
        [words[which], METHODS[method], *(f"{error:.2e}" for error in errors)]
        for which, methods in sorted(found["errors"].items())
        for method, errors in methods.items()
    ]
    return f"""## Accuracy at {found["tokens"]:,} tokens

Not in the paper. Relative error against float64 on sampled rows, fp16: gradients of long sequences fall below what
fp16 can hold inside other kernels, and are scaled here. {machine(found, name)}; repeat with
`python benchmarks/accuracy.py`.

{table(["rows", "", "out", "dQ", "dK", "dV"], rows)}"""


def cost() -> str:
    theirs = PAPER["cost"]
    ours = our_costs()
    columns = [
        "tokens",
        "ours, forward",
        "ours, both",
        *(f"theirs: {c}" for c in theirs["columns"]),
    ]
    rows = [
        [f"{int(tokens):,}", *ours.get(int(tokens), ("", "")), *map(ratio_cell, cells)]
        for tokens, cells in theirs["rows"].items()
    ]
    found = loaded("h200-targets.json")
    sources = [machine(found, "h200-targets.json")] if found else []
    bench = loaded("h200-bench-cost.json")
    tail = ""
    if bench is not None:
        tail = bench_costs(bench)
    return f"""## Cost against FlashAttention-2

Theirs: {theirs["what"]}; "deep": cut as deep as needed, accumulators in host memory; "oom": out of
memory. Ours: time over that of torch's FlashAttention-2 on the same GPU, and the measured peak of device memory, with a
budget of 1 GiB whatever the length (no figure: not measured). Inputs and results of ours are in page-locked host memory;
FlashAttention-2 has all on the device. {"; ".join(sources)}; repeat with
`python benchmarks/targets.py`.

{table(columns, rows)}{tail}"""


def ratio_cell(cell: Any) -> str:
    if cell is None:
        return "oom"
    return cell if isinstance(cell, str) else f"{cell[0]:.3g}, {cell[1]:.2f}"


def our_costs() -> dict[int, tuple[str, str]]:
    """By tokens: forward and forward+backward over FlashAttention-2's, with the peak."""
    found = loaded("h200-targets.json")
    cells = {}
    for case, methods in found["cases"].items() if found else ():
        if not case.isdigit() or "1GiB" not in methods.get("quorum", {}):
            continue
        ours, flash = methods["quorum"]["1GiB"], methods["flash"]
        peak = f"{ours['peak_bytes'] / 2**20:.0f} MiB"
        forward = ours["forward"] / flash["forward"]
        both = seconds(ours) / seconds(flash)
        cells[int(case)] = (f"{forward:.2f}, {peak}", f"{both:.2f}, {peak}")
    return cells


def seconds(one: dict[str, float]) -> float:
    return one["forward"] + one["backward"]


def bench_costs(found: Any) -> str:
    """Seconds and memory of every method, as `quorum-attention bench` measured them."""
    answers = {
        (m["spec"]["tokens"], m["spec"]["backward"], m["spec"]["method"]): m["answer"]
        for m in found["measurements"]
    }
    methods = list(dict.fromkeys(key[2] for key in answers))
    rows = []
    for tokens in sorted({key[0] for key in answers}):
        for backward in (False, True):
            cells = [bench_cell(answers, tokens, backward, method, "flash") for method in methods]
            if any(cells):
                rows.append([f"{tokens:,}", "forward+backward" if backward else "forward", *cells])
    words = machine(found["about"], "h200-bench-cost.json")
    return f"""
By `quorum-attention bench --only cost`, without a budget: milliseconds, time and peak device memory (inputs on the
device included) over FlashAttention-2's. {words}.

{table(["tokens", "", *(METHODS.get(m, m) for m in methods)], rows)}"""


def bench_cell(answers: Any, tokens: int, backward: bool, method: str, against: str) -> str:
    answer, other = (answers.get((tokens, backward, name)) for name in (method, against))
    if answer is None:
        return ""
    if answer["status"] != "ok":
        return str(answer["status"])
    mine, memory = spent(answer)
    text = f"{mine * 1000:.3g}"
    if other is not None and other["status"] == "ok" and method != against:
        theirs, held = spent(other)
        text += f": {mine / theirs:.3g}x, {memory / held:.2f}x memory"
    return text


def spent(answer: Any) -> tuple[float, int]:
    """Seconds (medians) and bytes of a measurement."""
    total = 0.0
    for name in ("forward_seconds", "backward_seconds"):
        total += median(answer[name]) if answer[name] else 0.0
    return total, (answer["peak_bytes"] or 0) + answer["input_bytes"]


def recovery() -> str:
    theirs = PAPER["recovery"]
    rows = [
        [name, *("oom" if c is None else c for c in cells)]
        for name, cells in theirs["rows"].items()
    ]
    return f"""## Where memory ends

The paper's: {theirs["what"]}. What their recovery takes grows with the length all the same; of ours at these lengths
there are no raw figures kept yet ([the planner](planner.md#measured-against-the-aims) has single calls of 4 and 8
million tokens, inside 1 GiB).

{table(["", *theirs["columns"]], rows)}"""


def budgets() -> str:
    found = loaded("h200-targets.json")
    if found is None:
        return ""
    rows = []
    for case, methods in found["cases"].items():
        for budget, ours in methods["quorum"].items():
            cells = [f"{ours['forward']:.3g}; {seconds(ours):.3g}"]
            for name in ("flash", "cudnn"):
                other = methods[name]
                forward, both = ours["forward"] / other["forward"], seconds(ours) / seconds(other)
                cells.append(f"{forward:.2f}; {both:.2f}")
            peak = f"{ours['peak_bytes'] / 2**20:.0f} MiB"
            rows.append([CASES.get(case, f"{case}"), budget, peak, *cells])
    words = machine(found, "h200-targets.json")
    return f"""## Less and less memory

Not in the paper, whose memory grows with the length at every setting: ours is the budget. Seconds, and time over
the monolithic kernels', which have all on the device; forward; forward+backward. {words}.

{table(["tokens", "budget", "measured peak", "seconds", "over FlashAttention-2", "over cuDNN"], rows)}"""


CASES = {
    "65536": "65,536", "262144": "262,144", "1048576": "1,048,576",
    "524288x128": "524,288, heads of 128", "gqa": "262,144, 32 heads over 8, of 128, bf16",
}  # fmt: skip


def census() -> str:
    from quorum_attention.decomposition import Decomposition

    rows = []
    for row in PAPER["census"]["rows"]:
        levels = tuple(row["levels"])
        counted = Decomposition(row["tokens"], levels, layout="balanced").census(True, 128)
        ours = [100 * share for share in (counted.masked, counted.clear, counted.mixed)]
        theirs = ["-" if p is None else f"{p:.3g}" for p in row["percent"]]
        aligned = Decomposition(row["tokens"], levels).census(True, 128)
        rows.append(
            [
                f"{row['tokens']:,}", " x ".join(map(str, levels)), " / ".join(theirs),
                " / ".join(f"{p:.3g}" for p in ours), f"{100 * aligned.mixed:.3g}",
            ]
        )  # fmt: skip
    columns = ["tokens", "chunks", "paper", "ours, the paper's layout", "mixed, our own layout"]
    return f"""## Tiles of the score square

Per cent of the 128 x 128 tiles of a task that are {" / ".join(PAPER["census"]["columns"])}; causal. Counted
from the plan, when this page is written (`Plan.census`). A mixed tile is one that a kernel has to mask; our own layout
puts the borders of chunks on those of tiles.

{table(columns, rows)}"""


def wrapped() -> str:
    theirs = PAPER["wrapped"]
    name = "h200-bench-wrapped.json"
    found = loaded(name)
    note = NOT_MEASURED
    if found is not None:
        apart = [m["answer"]["differences"] for m in found["measurements"] if m["spec"]["itself"]]
        draws = max(len(each) for one in apart for each in one.values())
        note = f"Ours, {draws} draws:\n{machine(found['about'], name)}.\n"
    ours = differences(found) if found is not None else {}
    rows = [
        [case, *(f"{x:.1e}" for x in numbers), *ours.get(case, ("",) * 3)]
        for case, numbers in theirs["rows"].items()
    ]
    columns = ["kernel", *(f"paper: {n}" for n in ("dQ", "dK", "dV"))]
    columns += [f"ours: {n}" for n in ("dQ", "dK", "dV")]
    return f"""## Other kernels, recovered

{theirs["what"]}: {theirs["tokens"]:,} tokens, inputs times {theirs["inputs_times"]}, {theirs["draws"]}
draws. The paper's LongNet and ours are different implementations with settings of their own. {note}
{table(columns, rows)}"""


def differences(found: Any) -> dict[str, tuple[str, ...]]:
    """By kernel and dtype: the largest differences of dQ, dK and dV."""
    cells = {}
    for measured in found["measurements"]:
        spec, apart = measured["spec"], measured["answer"]["differences"]
        if spec["itself"] and all(apart.get(name) for name in ("dQ", "dK", "dV")):
            largest = (max(pair[0] for pair in apart[name]) for name in ("dQ", "dK", "dV"))
            cells[f"{spec['method'].lower()} {spec['dtype']}"] = tuple(f"{x:.1e}" for x in largest)
    return cells


def more() -> str:
    return """## More of ours

[The planner](planner.md#measured-against-the-aims) has what was aimed at and missed, and why; [kernels](kernels.md),
[our own kernel](native.md) and [the kit](kit.md) theirs; [random calls](random-calls.md) what a hundred thousand of
them found.
"""


if __name__ == "__main__":
    main()
