"""``recover``: an attention call runs out of memory, and comes back exact.

torch's call runs under an enforced memory limit and fails. Quorum Attention computes the same call
under the same limit. Output and gradients are compared with float64. Each method that works is
called twice, because a first call compiles and plans.
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
from quorum_attention.planner import Plan, plan
from quorum_attention.planner.decide import both_passes
from quorum_attention.units import (
    counted,
    format_bytes,
    format_error,
    format_least,
    format_seconds,
)

# What a Python process allocates beside the call's tensors while it runs, on the CPU.
_PROCESS_BYTES = 2 << 20
_NO_PICTURE = f"none, for want of matplotlib; {install_hint('draw')}"
# There is no second call after so long a first one, nor torch's call without a limit.
PATIENCE_SECONDS = 45.0
_SHORT = {"out": "out", "lse": "lse", "grad_query": "dQ", "grad_key": "dK", "grad_value": "dV"}
_ACCEPTED = {
    torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-4, torch.float64: 1e-10,
}  # fmt: skip


def add_to(commands: Any) -> None:
    """Add the command."""
    summary = "make a call run out of memory, then recover it"
    parser = shared.add_command(commands, "recover", summary, __doc__, _run)
    shared.add(
        parser,
        ("--tokens", shared.count_of, f"{shared.TOKENS} (default: 262,144; 16,384 on a CPU)"),
        shared.CAUSAL,
        shared.HEADS,
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        ("--budget", shared.bytes_of, "memory limit of both methods, e.g. 64MiB (default: too "
         "little for torch)"),
        shared.DEVICE,
        ("--qkv", shared.name_of, "safetensors file with query, key and value (default: random)"),
        ("--forward-only", None, "compute no gradients"),
        ("--draw FILE", str, "write a picture of the call (.png, .svg)",
         "quorum-attention-out/recover.png"),
        shared.JSON,
    )  # fmt: skip
    parser.epilog = shared.GLOSSARY


@dataclass(frozen=True)
class _Setting:
    """The call that is made; random inputs are on the device "meta" here."""

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
        """What the process gets of the limit: on a GPU only torch's allocator is limited."""
        return _PROCESS_BYTES if self.device.type == "cpu" else 0

    def plan(self, *, backward: bool, **how: Any) -> Plan:
        """A plan of the call."""
        *batch, heads, tokens, width = self.query.shape
        return plan(
            tokens, n_keys=self.key.shape[-2], heads=heads, kv_heads=self.key.shape[-3],
            head_dim=width, value_dim=self.value.shape[-1],
            batch=max(1, torch.Size(batch).numel()), dtype=self.query.dtype,
            is_causal=self.is_causal, device=self.device, backward=backward, **how,
        )  # fmt: skip

    def measure(self, method: str, limited: bool, quiet: bool) -> Outcome:
        """Run a method in a process of its own."""
        *_, heads, tokens, width = self.query.shape
        return run_child(Spec(
            method, tokens, heads, self.key.shape[-3], width, str(self.query.dtype)[6:],
            self.is_causal, self.backward, str(self.device), inputs=self.file,
            limit_bytes=self.budget_bytes if limited else None,
            budget_bytes=max(0, self.budget_bytes - self.process_bytes),
            repeats=1, patience=PATIENCE_SECONDS, check=True, progress=not quiet,
        ))  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    Path(options.draw).parent.mkdir(parents=True, exist_ok=True)
    with suppress(ImportError):  # then there is no picture, which is said at the end
        check_drawable(options.draw)
    setting, quiet = _setting(options), options.json
    _refuse_too_small(setting)
    if not quiet:
        say(_headline(setting))
    answers = {
        "torch": setting.measure("sdpa", True, quiet),
        "Quorum Attention": setting.measure("quorum", True, quiet),
    }
    if _affordable(setting):
        answers["torch, no limit"] = setting.measure("sdpa", False, quiet)
    errors = [error for (error,) in answers["Quorum Attention"].errors.values()]
    recovered = bool(errors) and all(e < _ACCEPTED[setting.query.dtype] for e in errors)
    picture = _draw(setting, answers, options.draw)
    (_print_json if quiet else _print)(setting, answers, recovered, picture)
    return 0 if recovered else 1


def _refuse_too_small(setting: _Setting) -> None:
    """Refuse a budget that one of the passes cannot work in, before anything is run.

    Raises:
        ValueError: names the smallest budget that works for both.
    """
    process = setting.process_bytes

    def planned(backward: bool) -> Plan:
        return setting.plan(
            backward=backward, budget=max(0, setting.budget_bytes - process), results_given=True,
            inputs="host" if setting.device.type == "cuda" else "device",
        )  # fmt: skip

    try:
        planned(False) if not setting.backward else both_passes(planned)
    except BudgetError as error:
        smallest = error.smallest_bytes or 0
        parts = f" ({format_bytes(smallest)} for the call, {format_bytes(process)} for its process)"
        raise ValueError(
            f"--budget {format_bytes(setting.budget_bytes)} is too small for this call; the "
            f"smallest that works is {format_least(smallest + process)}{parts if process else ''}"
        ) from None


def _setting(options: argparse.Namespace) -> _Setting:
    device = shared.default_device(options.device)
    if options.qkv:
        shared.refuse(options, "does not go with --qkv", tokens=None, heads=None, dtype=None)
        given = read_inputs([options.qkv]).tensors
        if "mask" in given:
            raise ValueError(f"{options.qkv} has a mask, which this command does not take")
        query, key, value = given["query"], given["key"], given["value"]
    else:
        heads, tokens = options.heads or 8, 262_144 if device.type == "cuda" else 16_384
        size = options.tokens or tokens, options.head_dim
        dtype = options.dtype or shared.default_dtype(device.type)
        query, key, value = (
            torch.empty((1, n, *size), dtype=dtype, device="meta")
            for n in (heads, *[shared.kv_heads(heads, options.kv_heads)] * 2)
        )
    budget = options.budget
    if budget is None:
        # The output and one log-sum-exp a row are what torch's forward needs at least.
        least, share = (24 << 20, 0.75) if device.type == "cpu" else (64 << 20, 1.0)
        out_bytes = math.prod(query.shape[:-1]) * value.shape[-1] * query.element_size()
        budget = max(least, int(share * out_bytes))
    return _Setting(device, budget, options.causal, not options.forward_only, options.qkv,
                    query, key, value)  # fmt: skip


def _headline(setting: _Setting) -> str:
    *batch, heads, tokens, width = setting.query.shape
    many = f"{' x '.join(map(str, batch))} x " if batch and batch != [1] else ""
    kv = (
        ""
        if setting.key.shape[-3] == heads
        else f" over {counted(setting.key.shape[-3], 'key/value head')}"
    )
    dtype = str(setting.query.dtype).removeprefix("torch.")
    return (
        f"{counted(tokens, 'token')}, {many}{counted(heads, 'head')}{kv} of {width}, {dtype}, "
        f"{'causal' if setting.is_causal else 'not causal'}, "
        f"{'forward and backward' if setting.backward else 'forward'}, on "
        f"{setting.device}; memory limit {format_bytes(setting.budget_bytes)}"
    )


def _needed(setting: _Setting) -> tuple[int, float]:
    """Bytes beyond its inputs (results and workspace), and seconds, that torch's call takes."""
    passes = (False, True) if setting.backward else (False,)
    plans = [setting.plan(backward=backward, levels=(), inputs="device") for backward in passes]
    out = setting.query.nbytes if setting.backward else 0
    peaks = (plans[0].peak_bytes, plans[-1].peak_bytes + out)
    return max(peaks), sum(made.predicted_seconds for made in plans)


def _affordable(setting: _Setting) -> bool:
    """Whether torch's call without a limit, which is only for comparison, fits in memory and ends
    soon."""
    needed, seconds = _needed(setting)
    needed += sum(t.nbytes for t in (setting.query, setting.key, setting.value, setting.query))
    fits = 2 * needed < backend_of(setting.device).free_bytes(setting.device)
    return bool(fits and seconds < PATIENCE_SECONDS)


def _draw(setting: _Setting, answers: dict[str, Outcome], path: str) -> str | None:
    limited, ours, *free = answers.values()
    worked = [one.peak_bytes or 0 for one in (limited, *free) if one.ok]
    needed = worked[0] if worked else _needed(setting)[0]
    verb = "took" if limited.ok else "needs"
    bars = [
        (f"torch {verb}", needed, limited.status, limited.ok),
        ("Quorum Attention took", ours.peak_bytes or 0, ours.status, ours.ok),
    ]
    name = "backward" if ours.report.get("backward") else "forward"
    levels = (ours.report.get(name) or {}).get("levels", ())
    tokens = max(setting.query.shape[-2], setting.key.shape[-2])
    try:
        draw_recovery(
            path, decomposition=Decomposition(tokens, tuple(levels)),
            is_causal=setting.is_causal, budget_bytes=setting.budget_bytes, bars=bars,
            note=f"as the {name} was cut",
        )  # fmt: skip
    except ImportError:
        return None
    return path


def _print_json(
    setting: _Setting, answers: dict[str, Outcome], recovered: bool, picture: str | None
) -> None:
    methods = [{"method": label, **asdict(answer)} for label, answer in answers.items()]
    print_json({
        "call": _headline(setting), "budget_bytes": setting.budget_bytes, "recovered": recovered,
        "methods": methods, "picture": picture,
    })  # fmt: skip


def _print(
    setting: _Setting, answers: dict[str, Outcome], recovered: bool, picture: str | None
) -> None:
    """What failed, what came back, and the price."""
    limited, ours, *_ = answers.values()
    within = f"within {format_bytes(setting.budget_bytes)}"
    if limited.ok:
        say(
            f"torch {within}: worked, with {limited.memory}. There was "
            f"nothing to recover. Try a smaller --budget."
        )
    else:
        say(f"torch {within}: failed in its {limited.stage}: {limited.reason}")
    if ours.ok:
        right = f"Matches float64 on sampled rows: {'yes' if recovered else 'NO'}."
        say(f"Quorum Attention {within}: worked, with {ours.memory}. {right}")
        errors = ", ".join(
            f"{_SHORT[n]} {format_error(error)}" for n, (error,) in ours.errors.items()
        )
        say(f"relative errors: {errors}")
    else:
        stage = f" in its {ours.stage}" if ours.stage else ""
        say(f"Quorum Attention {within}: failed{stage}: {ours.reason}")
    worked = {label: answer for label, answer in answers.items() if answer.ok}
    if worked:
        figures = [_figures(answer) for answer in worked.values()]
        show_table(["", *worked], [[name, *(one[name] for one in figures)] for name in figures[0]])
    for name, part in ours.report.items():
        if part:
            levels = " x ".join(map(str, part["levels"])) or "none"
            work = f"{counted(part['units'], 'unit')} of {counted(part['heads_per_group'], 'head')}"
            say(f"{name}: levels {levels}, {work}, kernel {part['kernel']}")
    say(f"picture: {picture or _NO_PICTURE}")


def _figures(answer: Outcome) -> dict[str, str]:
    """What a table shows of a method that worked."""
    found, first = {"memory": answer.memory}, answer.first_seconds
    passes = {
        "forward": first[:1] + answer.forward_seconds,
        "backward": first[1:] + answer.backward_seconds,
    }
    for name, times in passes.items():
        for which, spent in zip_longest(("first", "second"), times) if times else ():
            found[f"{which} {name}"] = "-" if spent is None else format_seconds(spent)
    return found
