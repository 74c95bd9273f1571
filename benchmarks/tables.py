"""The tables of figures in README and on the page of results, from raw files alone.

    python benchmarks/tables.py            writes them below their markers
    python benchmarks/tables.py --check    fails where they are not what the raw files say

The paper's figures are in docs/data/paper.json, ours in benchmarks/results; the census is counted
anew. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from cases.plain import CASES

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
PLAIN = "python benchmarks/run.py plain --alone cudnn,fa2"
Pair = tuple[float, float]


def named(case: str) -> tuple[str, str]:
    """What a case of run.py plain is called, and its budget."""
    found, heads = CASES[case], ""
    if (found.kv_heads, found.head_dim) != (8, 64) or found.heads != 8:
        shared = "" if found.heads == found.kv_heads else f" over {found.kv_heads}"
        heads = f"{found.heads} heads{shared} of {found.head_dim}"
    places = {"device": "on the device", "pageable": "in ordinary memory"}
    words = [
        f"{found.tokens:,} tokens", heads, "" if found.dtype == torch.float16 else "bf16",
        f"a window of {found.window:,}" if found.window else "", places.get(found.place, ""),
        {"auto": "", "flex": "compiled FlexAttention"}.get(found.kernel, f"`{found.kernel}`"),
        "" if found.depth == "auto" else f"depth {found.depth}",
    ]  # fmt: skip
    return ", ".join(filter(None, words)), found.budget or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check, missing = parser.parse_args().check, set(TABLES)
    for path in (PAGE, README):
        text = path.read_text("utf-8")
        missing -= set(re.findall(r"<!-- table: (\w+) -->", text))
        made = MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}", text)
        if not check:
            path.write_text(made, encoding="utf-8")
        elif made != text:
            sys.exit(f"{path.name} is out of date: python benchmarks/tables.py")
    typed = re.findall(r".*\d\.\d.*", MARKED.sub("", PAGE.read_text("utf-8")))
    if missing or typed:
        sys.exit(f"tables without a marker: {missing}; figures typed by hand: {typed}")


def readme() -> str:
    """README's table."""
    found, source = plain_calls()
    fa4 = later(loaded("h200-fa4-plain.json")["cases"]["1048576"])
    errors = loaded(accuracy := "h200-accuracy-1048576.json")["errors"]["last"]
    (_, *ours), (_, *flash) = errors["quorum"], errors["flash"]
    step = loaded("h200-train-long.json")
    longest, long, two, small = (step[n] for n in ("longest", "long", "long_2", "longest_24GiB"))
    card, plain = small["shapes"]["Qwen3-4B"], ("run.py plain --alone cudnn,fa2", source)
    rows = [
        ("1,048,576 tokens in 1 GiB, against cuDNN", over(found["1048576"], "cudnn"), *plain),
        ("the same, against FlashAttention-2", over(found["1048576"], "fa2"), *plain),
        ("1,048,576 tokens in 1 GiB, with FlashAttention-4 inside, against it alone",
         over(fa4, "fa4"), "run.py plain --alone fa4", "h200-fa4-plain.json"),
        ("error of dQ and dV at 1,048,576 tokens, last 8,192 rows, over FlashAttention-2's",
         f"{ours[0] / flash[0]:.2f}; {ours[2] / flash[2]:.2f}", "run.py accuracy", accuracy),
        (f"{step['shape']}'s shape, LoRA: longest step in {gib(longest['memory'])} as it comes; a "
         f"step of {long['tokens']:,} tokens with everything",
         f"{longest['ways']['sdpa']['tokens']:,} tokens; {long['seconds']:.0f} s in "
         f"{gib(long['steps'][-1]['peak'])}", "run.py step", "h200-train-long.json"),
        (f"a step of {two['tokens']:,} tokens over two GPUs",
         f"{two['seconds']:.0f} s in {gib(two['steps'][-1]['peak'])} each",
         two["command"].removeprefix("python benchmarks/"), "h200-train-long.json"),
        (f"longest text of Qwen3-4B's shape in 24 GiB, {card['layers']} of {card['of_layers']} "
         "layers run: SDPA with its usual remedies; with everything",
         f"{card['remedies']:,}; {card['everything']:,} tokens, {whole_step(card)}",
         small["command"].removeprefix("python benchmarks/"), "h200-train-long.json"),
    ]  # fmt: skip
    lines = [
        (case, figures, f"[`python benchmarks/{command}`](benchmarks/results/{raw})")
        for case, figures, command, raw in rows
    ]
    return table(["case", "forward; forward+backward", "raw"], lines)


def whole_step(card: Any) -> str:
    """The seconds of the longest step that ran on a card of little memory with some of the layers;
    and what all layers take by that, with the host memory that ``estimate`` says."""
    seconds = card["everything_points"][-1]["seconds"]
    return (
        f"a step of these {seconds:.1f} s (all {card['of_layers']} layers, not run: by that "
        f"{seconds / card['layers'] * card['of_layers']:,.0f} s, and "
        f"{card['host_by_estimate'] / 2**30:.2f} GiB of host memory by `estimate`)"
    )


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


def section(
    name: str, command: str, columns: Sequence[str], rows: Iterable[Sequence[str]],
    about: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Where the figures of a table come from, and the table."""
    return f"{origin(name, command, about)}.\n\n{table(columns, rows)}"


def later(case: dict[str, Any]) -> dict[str, Pair]:
    """By method, medians of the calls after the first: forward, and forward+backward."""
    found = {}
    for name, calls in case.items():
        if name != "peak_bytes":
            forward, backward = (median(part) for part in zip(*(calls[1:] or calls), strict=True))
            found["ours" if name == "now" else name] = (forward, forward + backward)
    return found


def plain_calls() -> tuple[dict[str, dict[str, Any]], str]:
    """Cases of run.py plain, by name: pairs of each method, and "peak"; and the raw file."""
    name = "h200-targets.json"
    cases = loaded(name)["cases"]
    return {case: {**later(f), "peak": f["peak_bytes"]} for case, f in cases.items()}, name


def over(case: dict[str, Any], other: str) -> str:
    """Ratios of ours to another method: forward; forward+backward. Empty if it was not measured."""
    if other not in case:
        return ""
    return "; ".join(f"{a / b:.2f}" for a, b in zip(case["ours"], case[other], strict=True))


def gib(size: int) -> str:
    return f"{size / 2**30:.0f} GiB"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"


def accuracy() -> str:
    """Forward in both dtypes, then backward in both."""
    theirs, name = PAPER["accuracy"], "h200-bench-accuracy.json"
    rows = [
        [f"paper: {what}", *(f"{error:.3e}" for error in errors)]
        for what, errors in theirs["rows"].items()
    ]
    found = loaded(name)
    errors_of: dict[str, dict[str, Any]] = {}
    for one in found["measurements"]:
        of_method = errors_of.setdefault(one["spec"]["method"], {})
        of_method.setdefault(one["spec"]["dtype"], one["answer"]["errors"])
    for method, of_dtype in errors_of.items():
        cells = []
        for names, dtype in product((("out",), GRADIENTS), ("float16", "bfloat16")):
            errors = [of_dtype.get(dtype, {}).get(each) for each in names]
            cells.append(f"{mean(map(mean, errors)):.3e}" if all(errors) else "-")
        rows.append([f"here: {METHODS.get(method, method)}", *cells])
    command = "quorum-attention bench --only accuracy"
    return section(name, command, ["", *theirs["columns"]], rows, found["about"])


def long_accuracy() -> str:
    name = "h200-accuracy-1048576.json"
    found = loaded(name)
    words = {"last": "of the last 8,192", "random": "from anywhere"}
    rows = [
        [words[which], METHODS.get(method, method), *(f"{error:.2e}" for error in errors)]
        for which, methods in sorted(found["errors"].items())
        for method, errors in methods.items()
    ]
    columns = ["rows", "", "out", "dQ", "dK", "dV"]
    return section(name, "python benchmarks/run.py accuracy", columns, rows)


def cost() -> str:
    theirs = PAPER["cost"]
    found, source = plain_calls()
    rows = []
    for tokens, cells in theirs["rows"].items():
        ours = found.get(tokens)
        mine = ["", ""] if ours is None else [over(ours, "fa2"), mib(ours["peak"])]
        rows.append([f"{int(tokens):,}", *mine, *map(ratio_cell, cells)])
    columns = ["tokens", "ours, 1 GiB", "peak", *(f"theirs: {c}" for c in theirs["columns"])]
    return section(source, PLAIN, columns, rows)


def ratio_cell(cell: Any) -> str:
    return f"{cell[0]:.3g}, {cell[1]:.2f}" if isinstance(cell, list) else cell or "oom"


def budgets() -> str:
    found, source = plain_calls()
    rows = []
    for name, case in found.items():
        what, budget = named(name)
        seconds = "; ".join(f"{t:.3g}" for t in case["ours"])
        ratios = over(case, "fa2"), over(case, "cudnn")
        rows.append([what, budget, mib(case["peak"]), seconds, *ratios])
    columns = ["call", "budget", "measured peak", "seconds", "over FlashAttention-2", "over cuDNN"]
    return section(source, PLAIN, columns, rows)


def ratios_to(other: str, name: str, command: str) -> str:
    cases = loaded(name)["cases"].items()
    rows = [[*named(case), over(later(calls), other)] for case, calls in cases]
    return section(name, command, ["call", "budget", "ratio"], rows)


def beside_fa4() -> str:
    return ratios_to("fa4", "h200-fa4-plain.json", "python benchmarks/run.py plain --alone fa4")


def several() -> str:
    """Calls on several devices, and over ranks."""
    name = "h200-several.json"
    found = loaded(name)
    calls = [
        [f"{count} device{'s'[: int(count) - 1]}", f"1,048,576 tokens from host memory, {budget} each",
         "; ".join(f"{a / b:.2f}" for a, b in zip(
             *(later(seconds)[who] for who in ("one", "all")), strict=True))]
        for count, budgets in found["devices"].items() for budget, seconds in budgets.items()
    ]  # fmt: skip
    calls.append(["2 devices", "a forward in 1GiB each, a worker killed in the middle (`--kill`)",
                  f"{found['killed']['2']:.2f} times the ideal"])  # fmt: skip
    words = {
        "1048576": "1,048,576 tokens, 8 heads of 64, fp16",
        "131072": "131,072 tokens, 32 heads over 8 of 128, bf16",
        "8192-a-gpu-x8": "8,192 tokens a rank, 64 heads over 8 of 128, bf16, eight calls in a row",
    }

    def times(methods: dict[str, Pair], way: str) -> str:
        """How many times as fast as FlashAttention-4 on one device in the same run."""
        pairs = zip(methods["fa4"], methods[way], strict=True) if way in methods else ()
        return "; ".join(f"{one / mine:.2f}" for one, mine in pairs) or "-"

    ranks = [
        [f"{count} ranks", words[case], times(methods, "ours"), times(methods, "fa4 exchange"),
         times(found["rings"].get(count, {}).get(case, {"fa4": ()}), "cudnn ring")]
        for count, cases in found["ranks"].items() for case, methods in cases.items()
    ]  # fmt: skip
    commands = "python benchmarks/run.py devices`, `python benchmarks/run.py ranks"
    return f"""{section(name, commands, ["on", "call", "times one device"], calls)}
Ranks: a sequence that is sharded over them, on the devices, against FlashAttention-4 on one device with the whole sequence. Beside ours a plain
exchange of heads around FlashAttention-4, and torch's context parallel around cuDNN.

{table(["on", "call", "ours", "exchange", "torch's ring"], ranks)}"""


def versions() -> str:
    """Plain calls of an earlier state of the code and of a later one, in turn."""
    name = "h200-versions.json"
    return ratios_to("before", name, loaded(name)["command"])


def steps() -> str:
    name = "h200-train-long.json"
    found = loaded(name)
    equal, long, longest, two = (found[n] for n in ("equal", "long", "longest", "long_2"))
    half, card = found["long_524288"], found["longest_24GiB"]
    longer, told = found["long_393216"], [one["told"] / one["peak"] for one in found["told"]]
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
        [f"a step of {long['tokens']:,} tokens, everything, FlashAttention-4 inside",
         f"{seconds}, {memory}"],
        [f"a step of {longer['tokens']:,} tokens, the first",
         f"**{longer['seconds']:.0f} s with all {longer['of_layers']} layers, all run**, "
         f"{gib(longer['steps'][-1]['peak'])}"],
        [f"a step of {half['tokens']:,} tokens, the first, in {half['host']}",
         f"**{half['seconds']:.0f} s with all {half['of_layers']} layers, all run**, "
         f"{gib(half['steps'][-1]['peak'])}"],
        [f"{two['tokens']:,} tokens over two GPUs: the first step, memory of each",
         f"**{two['seconds']:.0f} s with all {two['of_layers']} layers, all run**, "
         f"{gib(two['steps'][-1]['peak'])}"],
        [f"longest text in {longest['memory'] / 2**30:.1f} GiB", "; ".join(texts)],
        [f"longest text in {gib(card['memory'])}, run ({card['commit']}; `{card['command']}`)",
         "; ".join(f"{name}, {of['layers']} of {of['of_layers']} layers: SDPA {of['sdpa']:,}, remedies {of['remedies']:,}, "
                   f"everything **{of['everything']:,}**, {of['everything'] / of['remedies']:.1f} times, {whole_step(of)}"
                   for name, of in card["shapes"].items())],
        ["peaks by `estimate --model` over measured ones (`--only told --budget 5GiB`), five "
         "lengths from 4,096 tokens, Qwen3-0.6B, 4B and 8B; two constants were fitted to them",
         f"{min(told):.2f} to {max(told):.2f}"],
    ]  # fmt: skip
    rest = origin(name, longest["command"], {**found, **longest})
    return f"""The long steps: {origin(name, long["command"], {**found, **long})}. Over two GPUs: commit {two["commit"]}, `{two["command"]}`. The rest: {rest}.

{table(["", ""], rows)}"""


def windows() -> str:
    name, other = "h200-windows.json", "h200-flex.json"
    found, flex = loaded(name), loaded(other)
    rows = [[named(case)[0], over(later(calls), "flex")] for case, calls in found["cases"].items()]
    for mask in ("causal", "window"):
        ratios = flex[mask]["ratios"]
        for way in ("uncut", "depth 1", "1 GiB"):
            both = "; ".join(f"{ratios[f'{way}, {what}']:.2f}" for what in ("forward", "both"))
            rows.append([f"{mask}, FlexAttention recovered, {way}", both])
    cases = "flex,flex-cut,flex-host,flex-causal,flex-causal-cut,flex-causal-host"
    rest = origin(other, f"python benchmarks/run.py plain --alone flex --cases {cases}")
    source = f"{origin(name, found['command'])}. FlexAttention recovered: {rest}"
    return f"{source}.\n\n{table(['call', 'ratio'], rows)}"


def native() -> str:
    name = "h200-native.json"
    kernels = loaded(name)["kernels"]
    rows = []
    for width in (64, 128):
        mine = kernels[f"native, {width}"]
        others = [kernels[f"{other}, {width}"] for other in ("flash", "cudnn")]
        cells = (" / ".join(f"{a / b:.2f}" for a, b in zip(mine, o, strict=True)) for o in others)
        rows.append([str(width), *cells])
    columns = ["head dimension", "over FlashAttention-2", "over cuDNN"]
    command = "python benchmarks/run.py plain --kernel native --alone cudnn,fa2"
    return section(name, command, columns, rows)


def small() -> str:
    name = "cpu-small-calls.json"
    rows = [
        [row["case"], *(f"{row[what]['beyond']:+.0f}" for what in ("forward", "forward+backward"))]
        for row in loaded(name)["microseconds"]
        if "float32" in row["case"]
    ]
    columns = ["batch x heads x queries x keys", "forward", "forward+backward"]
    return section(name, "python benchmarks/run.py small --cpu-time", columns, rows)


def entries() -> str:
    from cases.entries import WORDS

    files = {"one thread": "cpu-entries.json", "H200": "h200-entries.json"}
    columns = [loaded(name)["rows"] for name in files.values()]
    rows = [
        [words, *(f"{column[row]['ratio']:.2f}" for column in columns)]
        for row, words in WORDS.items()
    ]
    origins = [origin(name, loaded(name)["command"]) for name in files.values()]
    return f"{'; '.join(origins)}.\n\n{table(['calls', *files], rows)}"


def census() -> str:
    from quorum_attention.decomposition import Decomposition, Pairs
    from quorum_attention.decomposition import census as census_of

    rows = []
    for row in PAPER["census"]["rows"]:
        levels = tuple(row["levels"])
        pairs = Pairs(row["tokens"], row["tokens"], True)
        counted, aligned = (
            census_of(Decomposition(row["tokens"], levels, layout=layout).tasks(), pairs)
            for layout in ("balanced", "aligned")
        )
        ours = [100 * share for share in (counted.masked, counted.clear, counted.mixed)]
        theirs = ["-" if p is None else f"{p:.3g}" for p in row["percent"]]
        shares = [" / ".join(theirs), " / ".join(f"{p:.3g}" for p in ours)]
        mixed = f"{100 * aligned.mixed:.3g}"
        rows.append([f"{row['tokens']:,}", " x ".join(map(str, levels)), *shares, mixed])
    columns = ["tokens", "chunks", "paper", "ours, the paper's layout", "mixed, our own layout"]
    return table(columns, rows)


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
    return f"Inputs are times {theirs['inputs_times']}. Ours, {draws} draws and depths: {section(name, 'python benchmarks/run.py wrapped', columns, rows)}"


# By the names of their markers; a table reaches to the next heading, or to the end of it.
TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        readme, accuracy, long_accuracy, cost, budgets, beside_fa4, several, versions, steps,
        windows, native, small, entries, census, wrapped,
    )
}  # fmt: skip
MARKED = re.compile(r"(<!-- table: (\w+) -->\s+).*?(?=\n## |<!-- end of table -->|\Z)", re.DOTALL)

if __name__ == "__main__":
    main()
