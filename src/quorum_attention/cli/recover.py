"""``recover``: an attention call that runs out of memory comes back, exact.

torch's call runs under an enforced memory limit and fails; the same inputs go through Quorum
Attention under the same limit; output and gradients are checked against float64. Each method that
works is called twice, because a first call prepares what later ones find prepared.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from quorum_attention.bench.child import OK, Answer, Spec, run_child
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.files.inputs import read_inputs
from quorum_attention.pictures import check_drawable, draw_recovery
from quorum_attention.planner import Plan, plan
from quorum_attention.planner.decide import both_passes
from quorum_attention.sizes import format_bytes, format_least, format_seconds
from quorum_attention.verification import Problem, Sampled, compare, expect

# What a Python process allocates beside the call's tensors while it runs, on the CPU.
_PROCESS_BYTES = 2 << 20
_BLOCK_TOKENS = 1 << 16
# There is no second call after so long a first one, nor torch's call without a limit.
PATIENCE_SECONDS = 45.0
_ACCEPTED = {
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands,
        "recover",
        "watch a call that runs out of memory come back with the exact answer",
        __doc__,
    )
    shared.add(
        parser,
        ("--tokens", shared.count_of, f"{shared.TOKENS} (default: 262,144; 16,384 on a CPU)"),
        shared.HEADS,
        shared.KV_HEADS,
        shared.HEAD_DIM,
        shared.DTYPE,
        ("--budget", shared.bytes_of, "the memory limit for both methods, e.g. 64MiB (default: too "
         "little for torch)"),
        shared.DEVICE,
        ("--qkv", shared.name_of, "safetensors file with your own tensors (default: random ones)"),
        ("--forward-only", None, "no gradients"),
        ("--draw FILE", str, "write a picture of it (.png, .svg)",
         "quorum-attention-out/recover.png"),
        ("--seed", int, "of random inputs", 0),
        shared.JSON,
    )  # fmt: skip
    shared.add_causal(parser)
    parser.epilog = shared.GLOSSARY
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class _Setting:
    """The call that is made, and the files of its inputs and of its upstream gradient."""

    folder: Path
    inputs: str
    device: torch.device
    budget_bytes: int
    is_causal: bool
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor | None

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


@dataclass
class _Outcome:
    """One method: what its process answered, and how far its results are from float64."""

    label: str
    answer: Answer
    results: str
    errors: Sampled | None = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Of a first and a second call, by pass."""
        first, answer = self.answer.first_seconds, self.answer
        return {
            "forward": first[:1] + answer.forward_seconds,
            "backward": first[1:] + answer.backward_seconds,
        }


def _run(options: argparse.Namespace) -> int:
    Path(options.draw).parent.mkdir(parents=True, exist_ok=True)
    with suppress(ImportError):  # then there is no picture, which is said at the end
        check_drawable(options.draw)
    with tempfile.TemporaryDirectory(prefix="quorum-attention-recover-") as folder:
        setting = _setting(options, Path(folder))
        _refuse_too_small(setting)
        if not options.json:
            say(_headline(setting))
        outcomes = [
            _measure(setting, "torch", "sdpa", True, options.json),
            _measure(setting, "Quorum Attention", "quorum", True, options.json),
        ]
        if _affordable(setting):
            outcomes.append(_measure(setting, "torch, no limit", "sdpa", False, options.json))
        ours = outcomes[1]
        if ours.answer.ok:
            _check(setting, outcomes)
        accepted = _ACCEPTED[setting.query.dtype]
        recovered = ours.errors is not None and ours.errors.worst() < accepted
        picture = _draw(setting, outcomes, options.draw)
        if options.json:
            print_json(_as_json(setting, outcomes, recovered, picture))
        else:
            _print(setting, outcomes, recovered, picture)
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
        planned(False) if setting.grad_out is None else both_passes(planned)
    except BudgetError as error:
        smallest = error.smallest_bytes or 0
        parts = f" ({format_bytes(smallest)} for it, {format_bytes(process)} for its process)"
        raise ValueError(
            f"--budget {format_bytes(setting.budget_bytes)} is too small for this call; the "
            f"smallest that works is {format_least(smallest + process)}{parts if process else ''}"
        ) from None


def _setting(options: argparse.Namespace, folder: Path) -> _Setting:
    device = shared.default_device(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    inputs = options.qkv or str(folder / "inputs.safetensors")
    if not options.qkv:
        heads, tokens = options.heads or 8, 262_144 if device.type == "cuda" else 16_384
        dtype = options.dtype or shared.default_dtype(device.type)
        kv_heads = shared.kv_heads(heads, options.kv_heads)
        counts = {"query": heads, "key": kv_heads, "value": kv_heads}
        size = options.tokens or tokens, options.head_dim
        shapes = {name: ((1, n, *size), dtype) for name, n in counts.items()}
        for tensor in create_tensors(inputs, shapes).values():
            _fill(tensor, generator)
    for name in ("tokens", "heads", "dtype") if options.qkv else ():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} cannot be combined with --qkv, whose tensors have sizes")
    given = read_inputs([inputs]).tensors
    if "mask" in given:
        raise ValueError(f"{inputs} has a mask, which this command does not take")
    query, key, value = given["query"], given["key"], given["value"]
    shape, grad_out = (*query.shape[:-1], value.shape[-1]), None
    if not options.forward_only:
        path = folder / "gradient.safetensors"
        grad_out = create_tensors(path, {"grad_out": (shape, query.dtype)})["grad_out"]
        _fill(grad_out, generator)
    budget = options.budget
    if budget is None:
        # The output and one log-sum-exp a row are what torch's forward needs at least.
        least, share = (24 << 20, 0.75) if device.type == "cpu" else (64 << 20, 1.0)
        budget = max(least, int(share * math.prod(shape) * query.element_size()))
    return _Setting(folder, inputs, device, budget, options.causal, query, key, value, grad_out)


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Standard normal numbers, a block of tokens at a time."""
    for head in tensor.view(-1, *tensor.shape[-2:]):
        for block in head.split(_BLOCK_TOKENS):
            block.copy_(torch.randn(block.shape, generator=generator, device="cpu"))


def _headline(setting: _Setting) -> str:
    *batch, heads, tokens, width = setting.query.shape
    many = f"{' x '.join(map(str, batch))} x " if batch and batch != [1] else ""
    kv = "" if setting.key.shape[-3] == heads else f" over {setting.key.shape[-3]} key/value heads"
    dtype = str(setting.query.dtype).removeprefix("torch.")
    return (
        f"{tokens:,} tokens, {many}{heads} heads{kv} of {width}, {dtype}, "
        f"{'causal' if setting.is_causal else 'not causal'}, "
        f"{'forward' if setting.grad_out is None else 'forward and backward'}, on "
        f"{setting.device}; memory limit {format_bytes(setting.budget_bytes)}"
    )


def _measure(setting: _Setting, label: str, method: str, limited: bool, quiet: bool) -> _Outcome:
    """Run a method in a process of its own."""
    results = str(setting.folder / f"{method}-{'limited' if limited else 'free'}.safetensors")
    rows = tuple(setting.query.shape[:-1])
    state = torch.float64 if setting.query.dtype == torch.float64 else torch.float32
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "out": ((*rows, setting.value.shape[-1]), setting.query.dtype),
        "lse": (rows, state),
    }
    for name in () if setting.grad_out is None else ("query", "key", "value"):
        tensor: torch.Tensor = getattr(setting, name)
        wanted[f"grad_{name}"] = (tuple(tensor.shape), tensor.dtype)
    create_tensors(results, wanted)
    spec = Spec(
        method, backward=setting.grad_out is not None,
        files=(setting.inputs, str(setting.folder / "gradient.safetensors"), results),
        device=str(setting.device), is_causal=setting.is_causal,
        limit_bytes=setting.budget_bytes if limited else None,
        budget_bytes=max(0, setting.budget_bytes - setting.process_bytes),
        repeats=1, patience=PATIENCE_SECONDS, progress=not quiet,
    )  # fmt: skip
    return _Outcome(label, run_child(spec), results)


def _check(setting: _Setting, outcomes: list[_Outcome]) -> None:
    """Fill in the errors of every method that returned a result."""
    ours = open_tensors(outcomes[1].results)
    scale = setting.query.shape[-1] ** -0.5
    problem = Problem(setting.query, setting.key, setting.value, setting.is_causal, scale)
    expected = expect(problem, setting.grad_out, ours["out"], ours["lse"])
    for outcome in outcomes:
        if not outcome.answer.ok:
            continue
        found = open_tensors(outcome.results)
        grads = None
        if setting.grad_out is not None:
            grads = (found["grad_query"], found["grad_key"], found["grad_value"])
        # torch's call returns no log-sum-exp.
        lse = found["lse"] if outcome is outcomes[1] else None
        outcome.errors = compare(expected, found["out"], lse, grads)


def _needed(setting: _Setting) -> tuple[int, float]:
    """Bytes beyond its inputs (results and workspace), and seconds, that torch's call takes."""
    passes = (False,) if setting.grad_out is None else (False, True)
    plans = [setting.plan(backward=backward, levels=(), inputs="device") for backward in passes]
    out = 0 if setting.grad_out is None else setting.grad_out.nbytes
    peaks = (plans[0].peak_bytes, plans[-1].peak_bytes + out)
    return max(peaks), sum(made.predicted_seconds for made in plans)


def _affordable(setting: _Setting) -> bool:
    """Whether torch's call without a limit, which is only for comparison, fits in memory and ends
    soon."""
    needed, seconds = _needed(setting)
    if setting.device.type == "cuda":
        inputs = (setting.query, setting.key, setting.value, setting.grad_out)
        needed += sum(t.nbytes for t in inputs if t is not None)
    fits = 2 * needed < backend_of(setting.device).free_bytes(setting.device)
    return bool(fits and seconds < PATIENCE_SECONDS)


def _draw(setting: _Setting, outcomes: list[_Outcome], path: str) -> str | None:
    limited, ours, *free = outcomes
    worked = [one.answer.peak_bytes or 0 for one in (limited, *free) if one.answer.ok]
    needed = worked[0] if worked else _needed(setting)[0]
    verb = "took" if limited.answer.ok else "needs"
    bars = [
        (f"{limited.label} {verb}", needed, limited.answer.status, limited.answer.ok),
        (f"{ours.label} took", ours.answer.peak_bytes or 0, ours.answer.status, ours.answer.ok),
    ]
    report = ours.answer.report.get("backward") or ours.answer.report.get("forward") or {}
    tokens = max(setting.query.shape[-2], setting.key.shape[-2])
    try:
        draw_recovery(
            path, decomposition=Decomposition(tokens, tuple(report.get("levels", ()))),
            is_causal=setting.is_causal, budget_bytes=setting.budget_bytes, bars=bars,
        )  # fmt: skip
    except ImportError:
        return None
    return path


def _as_json(
    setting: _Setting, outcomes: list[_Outcome], recovered: bool, picture: str | None
) -> dict[str, Any]:
    methods = []
    for outcome in outcomes:
        answer, seconds = outcome.answer, outcome.seconds
        methods.append(
            {
                "method": outcome.label, "result": answer.status, "stage": answer.stage,
                "error": answer.reason, "peak_bytes": answer.peak_bytes, "report": answer.report,
                "forward_seconds": seconds["forward"], "backward_seconds": seconds["backward"],
                "errors": asdict(outcome.errors) if outcome.errors else None,
            }
        )  # fmt: skip
    return {
        "call": _headline(setting), "budget_bytes": setting.budget_bytes, "recovered": recovered,
        "methods": methods, "picture": picture,
    }  # fmt: skip


def _print(
    setting: _Setting, outcomes: list[_Outcome], recovered: bool, picture: str | None
) -> None:
    """What failed, what came back, and the price."""
    limited, ours = (outcome.answer for outcome in outcomes[:2])
    within = f"within {format_bytes(setting.budget_bytes)}"
    if limited.ok:
        say(
            f"torch {within}: worked, with {format_bytes(limited.peak_bytes or 0)}. There was "
            f"nothing to recover; try a smaller --budget."
        )
    else:
        say(f"torch {within}: failed in its {limited.stage}: {limited.reason}")
    if ours.ok:
        peak = format_bytes(ours.peak_bytes or 0)
        right = f"Matches float64 on sampled rows: {'yes' if recovered else 'NO'}."
        say(f"Quorum Attention {within}: worked, with {peak}. {right}")
    else:
        stage = f" in its {ours.stage}" if ours.stage else ""
        say(f"Quorum Attention {within}: failed{stage}: {ours.reason}")
    worked = [outcome for outcome in outcomes if outcome.answer.ok]
    if worked:
        figures = [_figures(setting, outcome) for outcome in worked]
        rows = [[name, *(one[name] for one in figures)] for name in figures[0]]
        show_table(["", *(outcome.label for outcome in worked)], rows)
    for name, part in ours.report.items():
        if part:
            levels = " x ".join(map(str, part["levels"])) or "none"
            units, heads = part["units"], part["heads_per_group"]
            say(
                f"{name}: levels {levels}, {units} {'unit' if units == 1 else 'units'} of {heads} "
                f"{'head' if heads == 1 else 'heads'}, kernel {part['kernel']}"
            )
    drawn = picture or 'none; pip install "quorum-attention[draw]"'
    say(f"picture: {drawn}")


def _figures(setting: _Setting, outcome: _Outcome) -> dict[str, str]:
    """What a table shows of a method that worked."""
    found = {"memory": format_bytes(outcome.answer.peak_bytes or 0)}
    names = {"out": "out"}
    if setting.grad_out is not None:
        names |= {"dQ": "grad_query", "dK": "grad_key", "dV": "grad_value"}
    for name, times in outcome.seconds.items():
        for which, spent in zip_longest(("first", "second"), times) if times else ():
            found[f"{name}, {which} call"] = "-" if spent is None else format_seconds(spent)
    for short, name in names.items():
        error = None if outcome.errors is None else getattr(outcome.errors, name)
        found[f"error of {short}"] = "-" if error is None else f"{error:.1e}"
    return found


__all__ = ["OK", "add_to"]
