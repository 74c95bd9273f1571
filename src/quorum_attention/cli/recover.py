"""``recover``: an attention call runs out of memory, and comes back exact.

torch's call runs under an enforced memory limit and fails. Quorum Attention computes
the same call under the same limit. Output and gradients are compared with float64. Each
method that works is called twice, because a first call compiles and plans.
"""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from quorum_attention.bench.child import run_child
from quorum_attention.bench.measurement import Outcome, Spec
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.extras import install_hint
from quorum_attention.files.inputs import read_inputs
from quorum_attention.pictures import check_drawable, draw_recovery
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner import Plan, plan
from quorum_attention.planner.decide import both_passes
from quorum_attention.units import (
    counted,
    format_bytes,
    format_error,
    format_least,
    format_seconds,
)

# A Python process on the CPU allocates so much beside the call's tensors.
_PROCESS_BYTES = 2 << 20
_NO_PICTURE = f"none, for want of matplotlib; {install_hint('draw')}"
# A longer first call is not repeated. A longer call of torch without a limit is not
# made.
PATIENCE_SECONDS = 45.0
_SHORT = {
    "out": "out",
    "lse": "lse",
    "grad_query": "dQ",
    "grad_key": "dK",
    "grad_value": "dV",
}
_ACCEPTED = {
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}


def add_to(commands: Any) -> None:
    """Add the command."""
    summary = "make a call run out of memory, then recover it"
    parser = shared.add_command(commands, "recover", summary, __doc__, _run)
    shared.add(
        parser,
        (
            "--tokens",
            shared.count_of,
            f"{shared.TOKENS} (default: 262,144; 16,384 on a CPU)",
        ),
        shared.CAUSAL,
        shared.HEADS,
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        (
            "--budget",
            shared.bytes_of,
            "memory limit of both methods, e.g. 64MiB (default: too little for torch)",
        ),
        shared.DEVICE,
        (
            "--qkv",
            shared.name_of,
            "safetensors file with query, key and value (default: random)",
        ),
        ("--forward-only", None, "compute no gradients"),
        (
            "--draw FILE",
            str,
            "write a picture of the call (.png, .svg)",
            "quorum-attention-out/recover.png",
        ),
        shared.JSON,
    )
    parser.epilog = shared.GLOSSARY


@dataclass(frozen=True)
class _Setting:
    """The call to measure. Random inputs are on the device "meta" here."""

    device: torch.device
    budget_bytes: int
    is_causal: bool
    backward: bool
    file: str | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def process_bytes(self) -> int:
        """The share of the limit that the process itself takes.

        On a GPU only torch's allocator is limited.
        """
        return _PROCESS_BYTES if self.device.type == "cpu" else 0

    def plan(self, *, backward: bool, **options: Any) -> Plan:
        """A plan of one pass of the call."""
        *batch, heads, tokens, width = self.query.shape
        return plan(
            tokens,
            n_keys=self.key.shape[-2],
            heads=heads,
            kv_heads=self.key.shape[-3],
            head_dim=width,
            value_dim=self.value.shape[-1],
            batch=max(1, torch.Size(batch).numel()),
            dtype=self.query.dtype,
            is_causal=self.is_causal,
            device=self.device,
            backward=backward,
            **options,
        )

    def measure(self, method: str, limited: bool, quiet: bool) -> Outcome:
        """Run a method in a process of its own."""
        *_, heads, tokens, width = self.query.shape
        return run_child(
            Spec(
                method,
                tokens,
                heads,
                self.key.shape[-3],
                width,
                str(self.query.dtype)[6:],
                self.is_causal,
                self.backward,
                str(self.device),
                inputs=self.file,
                limit_bytes=self.budget_bytes if limited else None,
                budget_bytes=max(0, self.budget_bytes - self.process_bytes),
                repeats=1,
                patience=PATIENCE_SECONDS,
                check=True,
                progress=not quiet,
            )
        )


def _run(options: argparse.Namespace) -> int:
    Path(options.draw).parent.mkdir(parents=True, exist_ok=True)
    with suppress(
        ImportError
    ):  # without matplotlib there is no picture, as the last line says
        check_drawable(options.draw)
    setting = _setting(options)
    quiet = options.json
    _refuse_too_small(setting)
    if not quiet:
        say(_headline(setting))
    outcomes = {
        "torch": setting.measure("sdpa", True, quiet),
        "Quorum Attention": setting.measure("quorum", True, quiet),
    }
    if _is_affordable(setting):
        outcomes["torch, no limit"] = setting.measure("sdpa", False, quiet)
    recovered = _is_exact(outcomes["Quorum Attention"], setting.query.dtype)
    picture = _draw(setting, outcomes, options.draw)
    show = _print_json if quiet else _print
    show(setting, outcomes, recovered, picture)
    return 0 if recovered else 1


def _is_exact(outcome: Outcome, dtype: torch.dtype) -> bool:
    """Whether results were compared with float64, and all errors are small for their
    dtype."""
    errors = [error for (error,) in outcome.errors.values()]
    return bool(errors) and max(errors) < _ACCEPTED[dtype]


def _refuse_too_small(setting: _Setting) -> None:
    """Refuse a budget that one of the passes cannot work in, before anything is run.

    Raises:
        ValueError: names the smallest budget that works for both.
    """
    process_bytes = setting.process_bytes
    budget = max(0, setting.budget_bytes - process_bytes)
    inputs = "host" if setting.device.type == "cuda" else "device"

    def plan_pass(backward: bool) -> Plan:
        return setting.plan(
            backward=backward, budget=budget, results_given=True, inputs=inputs
        )

    try:
        if setting.backward:
            both_passes(plan_pass)
        else:
            plan_pass(False)
    except BudgetError as error:
        call_bytes = error.smallest_bytes or 0
        message = (
            f"--budget {format_bytes(setting.budget_bytes)} is too small for this "
            "call; the smallest that works is "
            f"{format_least(call_bytes + process_bytes)}"
        )
        if process_bytes:
            call, process = format_bytes(call_bytes), format_bytes(process_bytes)
            message += f" ({call} for the call, {process} for its process)"
        raise ValueError(message) from None


def _setting(options: argparse.Namespace) -> _Setting:
    device = shared.default_device(options.device)
    query, key, value = (
        _read_qkv(options) if options.qkv else _empty_qkv(options, device)
    )
    budget = options.budget
    if budget is None:
        # torch's forward needs at least the output and one log-sum-exp a row.
        least_bytes, share = (
            (24 << 20, 0.75) if device.type == "cpu" else (64 << 20, 1.0)
        )
        out_bytes = math.prod(query.shape[:-1]) * value.shape[-1] * query.element_size()
        budget = max(least_bytes, int(share * out_bytes))
    return _Setting(
        device=device,
        budget_bytes=budget,
        is_causal=options.causal,
        backward=not options.forward_only,
        file=options.qkv,
        query=query,
        key=key,
        value=value,
    )


def _read_qkv(options: argparse.Namespace) -> list[torch.Tensor]:
    of_file = ("tokens", "heads", "kv_heads", "head_dim", "dtype")
    shared.refuse(options, "does not go with --qkv", *of_file)
    tensors = read_inputs([options.qkv]).tensors
    if "mask" in tensors:
        raise ValueError(f"{options.qkv} has a mask, which this command does not take")
    return [tensors["query"], tensors["key"], tensors["value"]]


def _empty_qkv(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Query, key and value on the device "meta"."""
    heads = options.heads or 8
    kv_heads = shared.kv_heads(heads, options.kv_heads)
    tokens = options.tokens or (262_144 if device.type == "cuda" else 16_384)
    dtype = options.dtype or shared.default_dtype(device.type)
    return [
        torch.empty((1, n, tokens, options.head_dim), dtype=dtype, device="meta")
        for n in (heads, kv_heads, kv_heads)
    ]


def _headline(setting: _Setting) -> str:
    *batch, heads, tokens, width = setting.query.shape
    sizes = [counted(tokens, "token")]
    batch_words = f"{' x '.join(map(str, batch))} x " if batch and batch != [1] else ""
    head_words = f"{batch_words}{counted(heads, 'head')}"
    kv_heads = setting.key.shape[-3]
    if kv_heads != heads:
        head_words += f" over {counted(kv_heads, 'key/value head')}"
    sizes.append(f"{head_words} of {width}")
    sizes.append(str(setting.query.dtype).removeprefix("torch."))
    causal = "causal" if setting.is_causal else "not causal"
    passes = "forward and backward" if setting.backward else "forward"
    return (
        f"{', '.join(sizes)}, {causal}, {passes}, on {setting.device}; "
        f"memory limit {format_bytes(setting.budget_bytes)}"
    )


def _torch_needs(setting: _Setting) -> tuple[int, float]:
    """The bytes that torch's call takes beyond its inputs (results and workspace), and
    seconds."""
    forward = setting.plan(backward=False, levels=(), inputs="device")
    if not setting.backward:
        return forward.peak_bytes, forward.predicted_seconds
    backward = setting.plan(backward=True, levels=(), inputs="device")
    # The forward's output stays for the backward.
    backward_bytes = backward.peak_bytes + setting.query.nbytes
    seconds = forward.predicted_seconds + backward.predicted_seconds
    return max(forward.peak_bytes, backward_bytes), seconds


def _is_affordable(setting: _Setting) -> bool:
    """Whether torch's call without a limit fits in memory and ends soon. The call is
    only there for comparison.
    """
    call_bytes, seconds = _torch_needs(setting)
    query_bytes = setting.query.nbytes
    grad_out_bytes = query_bytes
    input_bytes = (
        query_bytes + setting.key.nbytes + setting.value.nbytes + grad_out_bytes
    )
    backend = backend_of(setting.device)
    free_bytes = backend.free_bytes(setting.device)
    fits = 2 * (call_bytes + input_bytes) < free_bytes
    return fits and seconds < PATIENCE_SECONDS


def _draw(setting: _Setting, outcomes: dict[str, Outcome], path: str) -> str | None:
    """Write the picture. Returns its path, or None without matplotlib."""
    limited, ours, *unlimited = outcomes.values()
    torch_peaks = [
        outcome.peak_bytes or 0 for outcome in (limited, *unlimited) if outcome.ok
    ]
    torch_bytes = torch_peaks[0] if torch_peaks else _torch_needs(setting)[0]
    verb = "took" if limited.ok else "needs"
    bars = [
        (f"torch {verb}", torch_bytes, limited.status, limited.ok),
        ("Quorum Attention took", ours.peak_bytes or 0, ours.status, ours.ok),
    ]
    name = "backward" if ours.report.get("backward") else "forward"
    levels = (ours.report.get(name) or {}).get("levels", ())
    tokens = max(setting.query.shape[-2], setting.key.shape[-2])
    try:
        draw_recovery(
            path,
            decomposition=Decomposition(tokens, tuple(levels)),
            is_causal=setting.is_causal,
            budget_bytes=setting.budget_bytes,
            bars=bars,
            note=f"as the {name} was cut",
        )
    except ImportError:
        return None
    return path


def _print_json(
    setting: _Setting,
    outcomes: dict[str, Outcome],
    recovered: bool,
    picture: str | None,
) -> None:
    methods = [
        {"method": label, **asdict(outcome)} for label, outcome in outcomes.items()
    ]
    print_json(
        {
            "call": _headline(setting),
            "budget_bytes": setting.budget_bytes,
            "recovered": recovered,
            "methods": methods,
            "picture": picture,
        }
    )


def _print(
    setting: _Setting,
    outcomes: dict[str, Outcome],
    recovered: bool,
    picture: str | None,
) -> None:
    """Print failures, results and costs."""
    limited, ours, *_ = outcomes.values()
    limit = f"within {format_bytes(setting.budget_bytes)}"
    if limited.ok:
        say(
            f"torch {limit}: worked, with {limited.memory}. There was "
            f"nothing to recover. Try a smaller --budget."
        )
    else:
        say(f"torch {limit}: failed in its {limited.stage}: {limited.reason}")
    if ours.ok:
        exact = f"Matches float64 on sampled rows: {'yes' if recovered else 'NO'}."
        say(f"Quorum Attention {limit}: worked, with {ours.memory}. {exact}")
        errors = [
            f"{_SHORT[n]} {format_error(error)}" for n, (error,) in ours.errors.items()
        ]
        say(f"relative errors: {', '.join(errors)}")
    else:
        stage = f" in its {ours.stage}" if ours.stage else ""
        say(f"Quorum Attention {limit}: failed{stage}: {ours.reason}")
    _print_figures(
        {label: outcome for label, outcome in outcomes.items() if outcome.ok}
    )
    for name, report in ours.report.items():
        if report:
            say(f"{name}: {_pass_words(report)}")
    say(f"picture: {picture or _NO_PICTURE}")


def _pass_words(report: JsonObject) -> str:
    """The cut of a pass."""
    counts = [str(count) for count in report["levels"]]
    levels = " x ".join(counts) or "none"
    units = counted(report["units"], "unit")
    heads = counted(report["heads_per_group"], "head")
    return f"levels {levels}, {units} of {heads}, kernel {report['kernel']}"


def _print_figures(outcomes: dict[str, Outcome]) -> None:
    """Print a table of the methods that worked, a column each."""
    if not outcomes:
        return
    columns = [_figures(outcome) for outcome in outcomes.values()]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    show_table(["", *outcomes], rows)


def _figures(outcome: Outcome) -> dict[str, str]:
    """The memory and the seconds of a method, in words."""
    first_seconds = outcome.first_seconds
    passes = {
        "forward": first_seconds[:1] + outcome.forward_seconds,
        "backward": first_seconds[1:] + outcome.backward_seconds,
    }
    figures = {"memory": outcome.memory}
    for name, times in passes.items():
        if not times:
            continue
        for ordinal, seconds in zip_longest(("first", "second"), times):
            figures[f"{ordinal} {name}"] = (
                "-" if seconds is None else format_seconds(seconds)
            )
    return figures
