"""The tables of figures in README and on the page of results, from raw files alone.

    python benchmarks/tables.py            writes docs/results.md, and README's table
    python benchmarks/tables.py --check    fails where they are not what the raw files say

The paper's figures are in docs/data/paper.json, ours in benchmarks/results; the census is counted
anew. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAPER: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "paper.json").read_text("utf-8"))
GRADIENTS = ("grad_query", "grad_key", "grad_value")
METHODS = {
    "flash": "FlashAttention-2 (torch)", "cudnn": "cuDNN (torch)",
    "efficient": "memory-efficient (torch)", "quorum": "ours, as planned",
    "quorum-device": "ours, inputs on the device", "quorum-depth-1": "ours, depth 1",
    "quorum-depth-2": "ours, depth 2",
}  # fmt: skip
# Cases of run.py plain: what they are called, and their budgets.
CASES = {
    "65536": ("65,536 tokens", "1GiB"), "65536-128MiB": ("65,536 tokens", "128MiB"),
    "262144": ("262,144 tokens", "1GiB"),
    "262144-gqa": ("262,144 tokens, 32 heads over 8 of 128, bf16", "2GiB"),
    "262144-gqa-512MiB": ("262,144 tokens, 32 heads over 8 of 128, bf16", "512MiB"),
    "65536-gqa": ("65,536 tokens, 32 heads over 8 of 128, bf16", "1GiB"),
    "524288x128": ("524,288 tokens, heads of 128", "1GiB"),
    "1048576": ("1,048,576 tokens", "1GiB"), "1048576-512MiB": ("1,048,576 tokens", "512MiB"),
    "1048576-256MiB": ("1,048,576 tokens", "256MiB"),
    "1048576-128MiB": ("1,048,576 tokens", "128MiB"),
    "1048576-pageable": ("1,048,576 tokens in ordinary memory", "1GiB"),
    "1048576-device": ("1,048,576 tokens, on the device", "none"),
    "window": ("a window of 4,096 in 262,144 tokens, on the device, bf16", "none"),
    "window-gqa": ("the same window, 32 heads over 8 of 128", "none"),
    "native": ("262,144 tokens on the kernel `native`", "256MiB"),
    "flex": ("262,144 tokens, compiled FlexAttention, a window of 4,096, on the device", "none"),
    "flex-cut": ("the same at depth 1", "none"),
    "small": ("1,024 tokens, on the device", "none"),
    "262144-256MiB": ("262,144 tokens", "256MiB"),
    "262144-pageable": ("262,144 tokens in ordinary memory", "1GiB"),
}  # fmt: skip
# Of targets.json, which an earlier script wrote.
EARLIER = {("gqa", "2GiB"): "262144-gqa"}
Pair = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    for path, text in ((PAGE, page()), (README, readme())):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text("utf-8") != text:
            sys.exit(f"{path.name} is out of date: python benchmarks/tables.py")


def page() -> str:
    """The whole page."""
    sections = (
        head(), accuracy(), long_accuracy(), cost(), budgets(), beside_fa4(), several(),
        versions(), steps(), windows(), native(), small(), first(), census(), wrapped(),
    )  # fmt: skip
    return "\n".join(sections)


def readme() -> str:
    """README, with the table between its markers."""
    found, source = plain_calls()
    fa4 = later(loaded("h200-fa4-plain.json")["cases"]["1048576"])
    errors = loaded("h200-accuracy-1048576.json")["errors"]["last"]
    _, *ours = errors["quorum"]
    _, *flash = errors["flash"]
    step = loaded("h200-train-long.json")
    longest, long = step["longest"], step["long"]
    million, tight = found["1048576"], found["1048576-128MiB"]
    plain = "run.py plain --alone cudnn,fa2", source
    rows = [
        ("1,048,576 tokens in 1 GiB, against cuDNN", over(million, "cudnn"), *plain),
        ("the same, against FlashAttention-2", over(million, "fa2"), *plain),
        ("the same in 128 MiB, against FlashAttention-2", over(tight, "fa2"), *plain),
        ("1,048,576 tokens in 1 GiB, with FlashAttention-4 inside, against it alone",
         over(fa4, "fa4"), "run.py plain --alone fa4", "h200-fa4-plain.json"),
        ("error of dQ and dV at 1,048,576 tokens, last 8,192 rows, over FlashAttention-2's",
         f"{ours[0] / flash[0]:.2f}; {ours[2] / flash[2]:.2f}", "run.py accuracy",
         "h200-accuracy-1048576.json"),
        (f"{step['shape']}'s shape, LoRA: longest step in {gib(longest['memory'])} as it comes; a "
         f"step of {long['tokens']:,} tokens with everything",
         f"{longest['ways']['sdpa']['tokens']:,} tokens; {long['seconds']:.0f} s in "
         f"{gib(long['steps'][-1]['peak'])}", "run.py step", "h200-train-long.json"),
    ]  # fmt: skip
    lines = [
        (case, figures, f"[`python benchmarks/{command}`](benchmarks/results/{raw})")
        for case, figures, command, raw in rows
    ]
    text = table(["case", "forward; forward+backward", "raw"], lines)
    return between(README.read_text("utf-8"), text)


def between(page: str, text: str) -> str:
    """``page`` with ``text`` between the markers."""
    return re.sub(
        r"(<!-- results: [^\n]*-->\n).*?(<!-- end of results -->)",
        lambda found: f"{found[1]}{text}{found[2]}", page, flags=re.DOTALL,
    )  # fmt: skip


def loaded(name: str) -> Any:
    """A file of raw results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def origin(name: str, command: str, about: dict[str, Any] | None = None) -> str:
    """Where figures come from: machine, versions, command and raw file."""
    about = about or loaded(name)
    where = about.get("device") or about["machine"]
    cudnn = f", cuDNN {about['cudnn']}" if "cudnn" in about else ""
    commit = f", commit {about['commit']}" if "commit" in about else ""
    raw = f"[raw](../benchmarks/results/{name})"
    return f"{where}, torch {about['torch']}{cudnn}, {about['date']}{commit}: `{command}`, {raw}"


def later(case: dict[str, Any]) -> dict[str, Pair]:
    """By method, medians of the calls after the first: forward, and forward+backward."""
    found = {}
    for name, calls in case.items():
        if name != "peak_bytes":
            forward, backward = (median(part) for part in zip(*(calls[1:] or calls), strict=True))
            found["ours" if name == "now" else name] = (forward, forward + backward)
    return found


def plain_calls() -> tuple[dict[str, dict[str, Any]], str]:
    """Cases of run.py plain, by name: pairs of each method, and "peak"; and the raw file. Until that
    is there, from what an earlier script measured, which had its results allocated beforehand."""
    name = "h200-plain.json"
    if (RESULTS / name).exists():
        cases = loaded(name)["cases"]
        return {c: {**later(f), "peak": f.get("peak_bytes")} for c, f in cases.items()}, name
    found: dict[str, dict[str, Any]] = {}
    for case, methods in loaded("h200-targets.json")["cases"].items():
        for budget, ours in methods["quorum"].items():
            plain = EARLIER.get((case, budget)) or (
                case if budget == "1GiB" else f"{case}-{budget}"
            )
            pairs = {"ours": ours, "cudnn": methods["cudnn"], "fa2": methods["flash"]}
            found[plain] = {
                n: (p["forward"], p["forward"] + p["backward"]) for n, p in pairs.items()
            } | {"peak": ours["peak_bytes"]}
    return found, "h200-targets.json"


def over(case: dict[str, Any], other: str) -> str:
    """Ratios of ours to another method: forward; forward+backward. Empty if it was not measured."""
    if other not in case:
        return ""
    return "; ".join(f"{a / b:.2f}" for a, b in zip(case["ours"], case[other], strict=True))


def gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"


def head() -> str:
    return f"""# Results

<!-- Written by benchmarks/tables.py from docs/data/paper.json and benchmarks/results: do not edit. -->

The paper: *{PAPER["source"].split(";")[0]}*. Its figures are of {PAPER["machine"]}. Ratios carry over between machines,
seconds do not. Ours are of the machine that each table names, fp16, causal, unless it says otherwise. "theirs" is the method of the paper's authors,
as they measured it. Figures without a commit were measured before the code was made smaller in November 2026.
"""


def accuracy() -> str:
    theirs, name = PAPER["accuracy"], "h200-bench-accuracy.json"
    rows = [
        [f"paper: {what}", *(f"{error:.3e}" for error in errors)]
        for what, errors in theirs["rows"].items()
    ]
    found = loaded(name)
    methods = dict.fromkeys(m["spec"]["method"] for m in found["measurements"])
    rows += [[f"here: {METHODS.get(m, m)}", *errors_of(found, m)] for m in methods]
    return f"""## Accuracy at {theirs["tokens"]:,} tokens

Relative error against float64 on the same inputs (norm of the difference over the norm), mean of {theirs["draws"]} draws; backward: mean of the
three gradients. Less is better. Theirs returns float32, ours the inputs' 16 bits, as torch's kernels do. Cut by force (such a call fits uncut), ours
merges partial results that those kernels have rounded. {origin(name, "quorum-attention bench --only accuracy", found["about"])}.

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
    words = {"last": "of the last 8,192", "random": "from anywhere"}
    rows = [
        [words[which], METHODS.get(method, method), *(f"{error:.2e}" for error in errors)]
        for which, methods in sorted(found["errors"].items())
        for method, errors in methods.items()
    ]
    return f"""## Accuracy at {found["tokens"]:,} tokens

Relative error against float64 on sampled rows, fp16: gradients of long sequences fall below what fp16 can hold inside other kernels, and are
scaled here. {origin(name, "python benchmarks/run.py accuracy")}.

{table(["rows", "", "out", "dQ", "dK", "dV"], rows)}"""


def cost() -> str:
    theirs = PAPER["cost"]
    found, source = plain_calls()
    rows = []
    for tokens, cells in theirs["rows"].items():
        ours = found.get(tokens)
        mine = ["", ""] if ours is None else [over(ours, "fa2"), mib(ours["peak"])]
        rows.append([f"{int(tokens):,}", *mine, *map(ratio_cell, cells)])
    columns = ["tokens", "ours, 1 GiB", "peak", *(f"theirs: {c}" for c in theirs["columns"])]
    return f"""## Cost against FlashAttention-2

Theirs: {theirs["what"]}; "deep": cut as deep as needed, accumulators in host memory; "oom": out of memory. Ours: time
over that of torch's FlashAttention-2 on the same GPU, forward; forward+backward, and the measured peak, with a budget of 1 GiB whatever the length (no
figure: not measured). Inputs and results of ours are in page-locked host memory; FlashAttention-2 has all on the device.
{origin(source, "python benchmarks/run.py plain --alone cudnn,fa2")}.

{table(columns, rows)}"""


def ratio_cell(cell: Any) -> str:
    if cell is None:
        return "oom"
    return cell if isinstance(cell, str) else f"{cell[0]:.3g}, {cell[1]:.2f}"


def budgets() -> str:
    found, source = plain_calls()
    rows = []
    for name, case in found.items():
        what, budget = CASES[name]
        seconds = "; ".join(f"{t:.3g}" for t in case["ours"])
        ratios = over(case, "fa2"), over(case, "cudnn")
        rows.append([what, budget, mib(case["peak"]), seconds, *ratios])
    columns = ["call", "budget", "measured peak", "seconds", "over FlashAttention-2", "over cuDNN"]
    return f"""## Less and less memory

The paper's memory grows with the length at every setting: ours is the budget. Seconds, and time over that of kernels that have all on the device;
forward; forward+backward. {origin(source, "python benchmarks/run.py plain --alone cudnn,fa2")}.

{table(columns, rows)}"""


def beside_fa4() -> str:
    name = "h200-fa4-plain.json"
    cases = {case: later(calls) for case, calls in loaded(name)["cases"].items()}
    rows = [[*CASES.get(case, (case, "")), over(found, "fa4")] for case, found in cases.items()]
    return f"""## Plain calls with FlashAttention-4

Results made by the call, gradients by autograd, page-locked host memory unless it says otherwise, over FlashAttention-4 alone with everything on
the device; later calls, forward; forward+backward. {origin(name, "python benchmarks/run.py plain --alone fa4")}.

{table(["call", "budget", "ratio"], rows)}"""


def several() -> str:
    """Calls on several devices, and over ranks."""
    name = "h200-several.json"
    found = loaded(name)
    calls = [
        [f"{count} devices", f"1,048,576 tokens from host memory, {budget} each",
         "; ".join(f"{a / b:.2f}" for a, b in zip(
             *(later(seconds)[who] for who in ("one", "all")), strict=True))]
        for count, budgets in found["devices"].items() for budget, seconds in budgets.items()
    ]  # fmt: skip
    words = {
        "131072": "131,072 tokens, 32 heads over 8 of 128, bf16",
        "8192-a-gpu-x8": "8,192 tokens a rank, 64 heads over 8 of 128, bf16, eight calls in a row",
    }
    ranks = [
        [f"{count} ranks", words[case], *("; ".join(
            f"{one / mine:.2f}" for one, mine in zip(methods["fa4"], methods[way], strict=True)
        ) if way in methods else "-" for way in ("ours", "fa4 exchange", "cudnn ring"))]
        for count, cases in found["ranks"].items() for case, methods in cases.items()
    ]  # fmt: skip
    commands = "python benchmarks/run.py devices`, `python benchmarks/run.py ranks"
    return f"""## Several GPUs

How many times as fast as one of them, forward; forward+backward. Devices: a plain call with `devices="all"` against the same call on one, with
FlashAttention-4 inside both. {origin(name, commands)}.

{table(["on", "call", "times one device"], calls)}
Ranks: a sequence that is sharded over them, on the devices, against FlashAttention-4 on one device with the whole sequence. Beside ours a plain
exchange of heads around FlashAttention-4, and torch's context parallel around cuDNN.

{table(["on", "call", "ours", "exchange", "torch's ring"], ranks)}"""


def versions() -> str:
    """Plain calls of an earlier state of the code and of a later one, in turn."""
    name = "h200-versions.json"
    found = loaded(name)
    rows = [[*CASES[case], over(later(calls), "before")] for case, calls in found["cases"].items()]
    return f"""## Before and after the code was made smaller

The same plain calls of both, in turn, medians, later over earlier, forward; forward+backward. What came after the commit named here was
timed on a GPU in FlexAttention's calls and in the training step alone.
{origin(name, found["command"])}.

{table(["call", "budget", "ratio"], rows)}"""


def steps() -> str:
    name = "h200-train-long.json"
    found = loaded(name)
    equal, long, longest = found["equal"], found["long"], found["longest"]
    ways = ((way["what"], f"{way['gradients_off']:.4f}") for way in equal["ways"])
    last = long["steps"][-1]
    how = "extrapolated" if long["extrapolated"] else "all run"
    seconds = (f"**{long['seconds']:.0f} s with all {long['of_layers']} layers, {how}** (the first, after a step of one layer, "
               f"{last['first_seconds']:.0f} s)")  # fmt: skip
    texts = [
        f"{way}: {one['tokens']:,}{'' if one['ran'] else ' (by the line, not run)'}"
        for way, one in longest["ways"].items()
    ]
    memory = f"{last['peak'] / 2**30:.1f} GiB; attention's own {mib(long['attention_bytes'])}"
    rows = [
        [f"{equal['tokens']:,} tokens: gradients, distance from SDPA's (flash)",
         ", ".join(map(" ".join, ways))],
        [f"a step of {long['tokens']:,} tokens, everything, FlashAttention-4 inside", seconds],
        ["device memory there", memory],
        [f"longest text in {longest['memory'] / 2**30:.1f} GiB", "; ".join(texts)],
    ]  # fmt: skip
    return f"""## A training step

{found["shape"]}'s shape with random weights, LoRA, bf16. Checkpoints stay on the device while there is room, so the long step takes most of it.
The long step: {origin(name, long["command"], {**found, **long})}. The rest: {origin(name, "python benchmarks/run.py step --only equal,longest")}.

{table(["", ""], rows)}"""


def windows() -> str:
    name = "h200-windows.json"
    rows = [
        [f"window of 4,096, {row['what']}, {row['calls']} in a row",
         f"{row['seconds']['after'] / row['seconds']['flex']:.2f}"]
        for row in loaded(name)["rows"] if "flex" in row["seconds"]
    ]  # fmt: skip
    other = "h200-flex.json"
    flex = loaded(other)
    for mask in ("causal", "window"):
        ratios = flex[mask]["ratios"]
        for way in ("uncut", "depth 1", "slots"):
            both = "; ".join(f"{ratios[f'{way}, {what}']:.2f}" for what in ("forward", "both"))
            rows.append([f"{mask}, FlexAttention recovered, {way}: forward; both", both])
    return f"""## Windows, and FlexAttention recovered

262,144 tokens on the device, over torch's compiled FlexAttention with block lists made beforehand. "depth 1": 7 chunks, in place; "slots": the same
through slots. {origin(name, "python benchmarks/run.py window")}; [raw](../benchmarks/results/{other}) of recovered FlexAttention.

{table(["call", "ratio"], rows)}"""


def native() -> str:
    name = "h200-native.json"
    kernels = loaded(name)["kernels"]
    rows = []
    for width in (64, 128):
        mine = kernels[f"native, {width}"]
        cells = (
            " / ".join(f"{a / b:.2f}" for a, b in zip(mine, kernels[f"{o}, {width}"], strict=True))
            for o in ("flash", "cudnn")
        )
        rows.append([str(width), *cells])
    columns = ["head dimension", "over FlashAttention-2", "over cuDNN"]
    return f"""## Our own kernel

131,072 tokens, 8 heads, on the device, forward / backward. {origin(name, "python benchmarks/run.py plain --kernel native --alone cudnn,fa2")}.

{table(columns, rows)}"""


def small() -> str:
    name = "cpu-small-calls.json"
    rows = [
        [row["case"], *(f"{row[what]['beyond']:+.0f}" for what in ("forward", "forward+backward"))]
        for row in loaded(name)["microseconds"]
        if "float32" in row["case"]
    ]
    return f"""## Small calls on a CPU

Microseconds beyond torch's own call; one thread. {origin(name, "python benchmarks/run.py small --cpu-time")}.

{table(["batch x heads x queries x keys", "forward", "forward+backward"], rows)}"""


def first() -> str:
    return """## First calls

Seconds of first and later calls in new processes, with and without caches on disk: `python benchmarks/run.py first`,
[raw](../benchmarks/results/h200-first-calls.txt).
"""


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

Per cent of the 128 x 128 tiles of a task that are {" / ".join(PAPER["census"]["columns"])}; causal. Counted when this page is written (`Plan.census`).
A mixed tile is one that a kernel has to mask; our own layout puts the borders of chunks on those of tiles.

{table(columns, rows)}"""


def wrapped() -> str:
    theirs, name = PAPER["wrapped"], "h200-wrapped.json"
    ours, names = loaded(name)["differences"], ("dQ", "dK", "dV")
    rows = [
        [case, *(f"{x:.1e}" for x in numbers),
         *(f"{max(ours[case][n])[0]:.1e}" if case in ours else "" for n in names)]
        for case, numbers in theirs["rows"].items()
    ]  # fmt: skip
    draws = max(len(pairs) for apart in ours.values() for pairs in apart.values())
    columns = ["kernel", *(f"{who}: {n}" for who in ("paper", "ours") for n in names)]
    return f"""## Other kernels, recovered

{theirs["what"]}: {theirs["tokens"]:,} tokens, inputs times {theirs["inputs_times"]}, {theirs["draws"]} draws. The paper's LongNet and ours are
different implementations with settings of their own. Ours, {draws} draws and depths: {origin(name, "python benchmarks/run.py wrapped")}.

{table(columns, rows)}"""


if __name__ == "__main__":
    main()
