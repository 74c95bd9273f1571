"""The paper's experiments: what each measures, and the tables that it makes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from statistics import mean, median
from typing import Any, NamedTuple

from quorum_attention.bench.measurement import FAILED, OUT_OF_MEMORY, Outcome, Spec
from quorum_attention.bench.methods import METHODS, RESULTS
from quorum_attention.plain_types import JsonObject, Keywords
from quorum_attention.units import counted

Measure = Callable[[str, Spec], Outcome]
"""Measures a spec of an experiment, given the experiment's name."""

_SHORT_NAMES = {"out": "out", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}
_DRAWS = 10
_QUICK_DRAWS = 2
_REPEATS = 3
# A method ends at its first length that fails, or if its next one is expected to take
# longer.
_MOST_SECONDS = 300.0
_MOST_QUICK_SECONDS = 20.0
# Work grows with the square of the length.
_GROWTH = 4

# The methods worth comparing on a device. Ratios are against the first: on GPUs
# FlashAttention-2, as in the paper.
USUAL_METHODS = {
    "cpu": ["sdpa", "quorum", "quorum-depth-1", "quorum-depth-2"],
    "cuda": [name for name in METHODS if name != "sdpa"],
}


class Section(NamedTuple):
    """A table of the report."""

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]


def spec_of(options: Namespace, method: str, tokens: int, **fields: Any) -> Spec:
    """A measurement of ``method``, with the sizes that the command's options have."""
    sizes: Keywords = {
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "dtype": options.dtype,
        "device": options.device,
    }
    return Spec(method, tokens, **sizes | fields)


def row_of(experiment: str, spec: Spec, outcome: Outcome) -> JsonObject:
    """The row of a measurement in the record of a run."""
    passes = "both" if spec.backward else "forward"
    length = counted(spec.tokens, "token")
    name = f"{experiment}: {spec.method}, {length}, {spec.dtype}, {passes}"
    row = {"experiment": experiment, "spec": asdict(spec), "answer": asdict(outcome)}
    return {name: row}


def accuracy(options: Namespace, measure: Measure) -> Section:
    """Forward and backward errors of every method in both 16-bit dtypes (fp32 on a CPU
    too)."""
    dtypes = ["float16", "bfloat16"]
    if options.device == "cpu":
        dtypes.append("float32")
    draws = _DRAWS
    if options.quick:
        dtypes = [options.dtype]
        draws = _QUICK_DRAWS
    rows = []
    for method in options.methods:
        for dtype in dtypes:
            spec = spec_of(
                options,
                method,
                options.tokens,
                dtype=dtype,
                backward=True,
                draws=draws,
            )
            measurement = measure("accuracy", spec)
            rows.append([method, dtype, *_error_cells(measurement)])
    text = (
        f"{counted(options.tokens, 'token')}, relative error (norm of the difference "
        f"over the norm) against float64, mean of {counted(draws, 'draw')}."
    )
    columns = ["method", "dtype", *_SHORT_NAMES.values()]
    return Section("Accuracy against float64", text, columns, rows)


def _error_cells(measurement: Outcome) -> list[str]:
    if not measurement.ok:
        return [label(measurement)] * len(RESULTS)
    return [f"{mean(errors):.2e}" for errors in measurement.errors.values()]


def cost(options: Namespace, measure: Measure) -> Section:
    """Time and memory over sequence length, forward and forward+backward."""
    repeats = 1 if options.quick else _REPEATS
    first_seconds: dict[tuple[int, bool], float] = {}
    rows = []
    for backward in (True,) if options.quick else (False, True):
        for method in options.methods:
            rows += _cost_rows(
                options,
                measure,
                method,
                backward,
                repeats,
                first_seconds,
            )
    text = (
        f"Seconds (median of {repeats}), ratio to the first method that ran, and peak "
        "memory beyond the inputs. Both: forward and backward. oom: out of memory."
    )
    columns = ["method", "tokens", "passes", "seconds", "ratio", "memory"]
    return Section("Cost", text, columns, rows)


def _cost_rows(
    options: Namespace,
    measure: Measure,
    method: str,
    backward: bool,
    repeats: int,
    first_seconds: dict[tuple[int, bool], float],
) -> list[list[str]]:
    """The rows of one method, from the shortest length to the longest that it can do.

    Args:
        first_seconds: of the first method that ran, by length and passes; filled here.
    """
    most_seconds = _MOST_QUICK_SECONDS if options.quick else _MOST_SECONDS
    tokens, last_tokens = options.lengths
    passes = "both" if backward else "forward"
    seconds = 0.0
    rows: list[list[str]] = []
    while tokens <= last_tokens and _GROWTH * (repeats + 1) * seconds <= most_seconds:
        spec = spec_of(
            options,
            method,
            tokens,
            backward=backward,
            repeats=repeats,
        )
        measurement = measure("cost", spec)
        row = [method, f"{tokens:,}", passes]
        rows.append(row)
        if not measurement.ok:
            row += [label(measurement), "", ""]
            return rows
        seconds = median(measurement.call_seconds())
        ratio = seconds / first_seconds.setdefault((tokens, backward), seconds)
        row += [f"{seconds:.4g}", f"{ratio:.3g}", measurement.memory]
        tokens *= 2
    return rows


EXPERIMENTS = {"accuracy": accuracy, "cost": cost}


def label(measurement: Outcome) -> str:
    """A table's cell for a measurement without numbers."""
    labels = {OUT_OF_MEMORY: "oom", FAILED: "failed"}
    return labels.get(measurement.status, "-")
