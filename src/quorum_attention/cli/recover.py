"""``recover``: an attention call that runs out of memory comes back, exact.

The monolithic call runs under a real memory limit and fails; the same inputs go through
quorum attention under the same limit; output and gradients are checked against float64. Each method
that works is called twice, because a first call prepares what later ones find prepared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cli import options as shared
from quorum_attention.cli.child import (
    FAILED,
    OK,
    PATIENCE_SECONDS,
    WARM_TOKENS,
    Answer,
    Spec,
)
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.files.inputs import read_qkv
from quorum_attention.pictures import check_drawable
from quorum_attention.planner import Plan, plan
from quorum_attention.planner.decide import both_passes
from quorum_attention.sizes import format_bytes, format_least, format_seconds
from quorum_attention.verification import Problem, Sampled, compare, expect
from quorum_attention.writing import folder_of_now

# What a Python process allocates beside the call's tensors while it runs, on the CPU.
_PROCESS_BYTES = 2 << 20
_BLOCK_TOKENS = 1 << 16
_CHILD = """
import sys
from quorum_attention.lifetime import end_with

end_with(int(sys.argv[2]))
from quorum_attention.cli.child import main

main(sys.argv[1])
"""
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
    shared.add_sizes(
        parser,
        tokens_required=False,
        usual_tokens="262,144; 16,384 on a CPU",
        usual_dtype="float16; float32 on a CPU",
    )
    shared.add_budget(
        parser, "the memory limit for both methods, e.g. 64MiB (default: too little for torch)"
    )
    shared.add_device(parser)
    parser.add_argument(
        "--qkv",
        type=shared.name_of,
        metavar="FILE",
        help="safetensors file with your own tensors (default: random ones)",
    )
    parser.add_argument("--forward-only", action="store_true", help="no gradients")
    shared.add_draw(parser, "it", "quorum-attention-out/recover.png")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs")
    shared.add_json(parser)
    shared.add_glossary(parser)
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class _Setting:
    """The call that is made, and where its files are."""

    folder: Path
    inputs: str
    device: torch.device
    budget_bytes: int
    is_causal: bool
    backward: bool
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor | None


@dataclass
class _Outcome:
    """One method: what its process answered, and how far its results are from float64."""

    label: str
    answer: Answer
    results: str
    errors: Sampled | None = None

    @property
    def ran(self) -> bool:
        """Whether it returned a result."""
        return self.answer.result == OK


def _run(options: argparse.Namespace) -> int:
    Path(options.draw).parent.mkdir(parents=True, exist_ok=True)
    with suppress(ImportError):  # then there is no picture, which is said at the end
        check_drawable(options.draw)
    with folder_of_now("quorum-attention-recover-") as folder:
        setting = _setting(options, folder)
        _refuse_too_small(setting)
        quiet = options.json
        budget = format_bytes(setting.budget_bytes)
        if not quiet:
            say(_headline(setting))
        limited = _measure(setting, f"torch SDPA within {budget}", "sdpa", True, quiet)
        ours = _measure(setting, f"Quorum Attention within {budget}", "quorum", True, quiet)
        outcomes = [limited, ours]
        if _affordable(setting):
            outcomes.append(_measure(setting, "torch SDPA, no limit", "sdpa", False, quiet))
        if ours.ran:
            _check(setting, outcomes)
        recovered = _is_recovered(setting, ours)
        picture = _draw(setting, outcomes, options.draw)
        if options.json:
            print_json(_as_json(setting, outcomes, recovered, picture))
        else:
            _print(setting, outcomes, recovered, picture)
    return 0 if recovered else 1


def _refuse_too_small(setting: _Setting) -> None:
    """A budget that one of the passes cannot work in is refused before anything is run.

    Raises:
        ValueError: it is; names the smallest that works for both.
    """
    process = _process_bytes(setting.device)
    passes = both_passes if setting.backward else lambda of: of(False)
    try:
        passes(
            lambda backward: _planned(
                setting,
                backward=backward,
                budget=max(0, setting.budget_bytes - process),
                inputs="host" if setting.device.type == "cuda" else "device",
                results_given=True,
            )
        )
    except BudgetError as error:
        smallest = error.smallest_bytes or 0
        parts = f" ({format_bytes(smallest)} for it, {format_bytes(process)} for its process)"
        raise ValueError(
            f"--budget {format_bytes(setting.budget_bytes)} is too small for this call; the "
            f"smallest that works is {format_least(smallest + process)}{parts if process else ''}"
        ) from None


def _process_bytes(device: torch.device) -> int:
    """What of a limit is left to the process: on a GPU only torch's allocator is limited."""
    return _PROCESS_BYTES if device.type == "cpu" else 0


def _setting(options: argparse.Namespace, folder: Path) -> _Setting:
    device = shared.default_device(options.device)
    if options.qkv:
        given = {"--tokens": options.tokens, "--heads": options.heads, "--dtype": options.dtype}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{named[0]} cannot be combined with --qkv, whose tensors have sizes")
        inputs = options.qkv
    else:
        inputs = str(folder / "inputs.safetensors")
        _random_inputs(options, device, inputs)
    query, key, value = read_qkv(inputs)
    grad_out = None
    if not options.forward_only:
        shape = (*query.shape[:-1], value.shape[-1])
        path = str(folder / "gradient.safetensors")
        grad_out = create_tensors(path, {"grad_out": (shape, query.dtype)})["grad_out"]
        _fill(grad_out, torch.Generator().manual_seed(options.seed + 1))
    budget = options.budget
    if budget is None:
        budget = _default_budget(query, value, device)
    return _Setting(
        folder, inputs, device, budget, options.causal, not options.forward_only, query, key,
        value, grad_out,
    )  # fmt: skip


def _random_inputs(options: argparse.Namespace, device: torch.device, path: str) -> None:
    large = device.type == "cuda"
    tokens = options.tokens or (262_144 if large else 16_384)
    heads = options.heads or 8
    dtype = options.dtype or (torch.float16 if large else torch.float32)
    kv_heads = options.kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {heads} and {kv_heads}")
    shapes = {
        "query": ((1, heads, tokens, options.head_dim), dtype),
        "key": ((1, kv_heads, tokens, options.head_dim), dtype),
        "value": ((1, kv_heads, tokens, options.head_dim), dtype),
    }
    generator = torch.Generator().manual_seed(options.seed)
    for tensor in create_tensors(path, shapes).values():
        _fill(tensor, generator)


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Standard normal numbers, a block of tokens at a time."""
    flat = tensor.view(-1, *tensor.shape[-2:])
    for head in flat:
        for start in range(0, head.shape[0], _BLOCK_TOKENS):
            block = head[start : start + _BLOCK_TOKENS]
            block.copy_(torch.randn(block.shape, generator=generator, device="cpu"))


def _default_budget(query: torch.Tensor, value: torch.Tensor, device: torch.device) -> int:
    """Less than the monolithic call's output alone on a CPU, than that and its log-sum-exp on a
    GPU."""
    result = query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()
    return max(24 << 20, int(0.75 * result)) if device.type == "cpu" else max(64 << 20, result)


def _headline(setting: _Setting) -> str:
    *batch, heads, tokens, width = setting.query.shape
    many = f"{' x '.join(map(str, batch))} x " if batch and batch != [1] else ""
    kv = "" if setting.key.shape[-3] == heads else f" over {setting.key.shape[-3]} key/value heads"
    dtype = str(setting.query.dtype).removeprefix("torch.")
    return (
        f"{tokens:,} tokens, {many}{heads} heads{kv} of {width}, {dtype}, "
        f"{'causal' if setting.is_causal else 'not causal'}, "
        f"{'forward and backward' if setting.backward else 'forward'}, on {setting.device}; "
        f"each method in a process that may take {format_bytes(setting.budget_bytes)} "
        f"beyond its start"
    )


def _counted(setting: _Setting) -> str:
    """What the limit and the peaks count."""
    if setting.device.type != "cpu":
        return (
            "Limit and peaks count what torch's allocator hands out beyond the inputs: torch has "
            "them on the device beforehand, Quorum Attention reads them from the host."
        )
    return (
        f"Limit and peaks count all that the process allocates beyond its start (inputs and "
        f"results are in files): of {format_bytes(setting.budget_bytes)}, "
        f"{format_bytes(_PROCESS_BYTES)} are left to the process, "
        f"{format_bytes(setting.budget_bytes - _PROCESS_BYTES)} are the budget of the attention."
    )


def _measure(setting: _Setting, label: str, method: str, limited: bool, quiet: bool) -> _Outcome:
    """Run a method in a child process and check what it returned."""
    name = f"{method}-{'limited' if limited else 'free'}"
    results = str(setting.folder / f"{name}.safetensors")
    rows = tuple(setting.query.shape[:-1])
    state = torch.float64 if setting.query.dtype == torch.float64 else torch.float32
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "out": ((*rows, setting.value.shape[-1]), setting.query.dtype),
        "lse": (rows, state),
    }
    if setting.backward:
        for what in ("query", "key", "value"):
            tensor: torch.Tensor = getattr(setting, what)
            wanted[f"grad_{what}"] = (tuple(tensor.shape), tensor.dtype)
    create_tensors(results, wanted)
    spec = Spec(
        method=method,
        inputs=setting.inputs,
        gradient=str(setting.folder / "gradient.safetensors") if setting.backward else None,
        results=results,
        device=str(setting.device),
        is_causal=setting.is_causal,
        limit_bytes=setting.budget_bytes if limited else None,
        budget_bytes=max(0, setting.budget_bytes - _process_bytes(setting.device)),
        answer=str(setting.folder / f"{name}.json"),
        progress=not quiet,
    )
    return _Outcome(label, _child(spec, setting.folder / f"{name}-spec.json"), results)


def _check(setting: _Setting, outcomes: list[_Outcome]) -> None:
    """Fill in the errors of every method that returned a result."""
    ours = open_tensors(outcomes[1].results)
    scale = setting.query.shape[-1] ** -0.5
    problem = Problem(setting.query, setting.key, setting.value, setting.is_causal, scale)
    expected = expect(problem, setting.grad_out, ours["out"], ours["lse"])
    for outcome in outcomes:
        if not outcome.ran:
            continue
        found = open_tensors(outcome.results)
        grads = None
        if setting.backward:
            grads = (found["grad_query"], found["grad_key"], found["grad_value"])
        # torch's call returns no log-sum-exp.
        lse = found["lse"] if outcome is outcomes[1] else None
        outcome.errors = compare(expected, found["out"], lse, grads)


def _child(spec: Spec, path: Path) -> Answer:
    path.write_text(json.dumps(asdict(spec)))
    # glibc keeps freed memory unless told to map large blocks on their own.
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
        # On a busy machine, threads that spin while they wait take the cores from each other.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-c", _CHILD, str(path), str(os.getpid())]
    # A Ctrl-C reaches the child as well; run() waits for it and kills it if it does not go.
    finished = subprocess.run(command, env=environment, stderr=None, check=False)
    answer = Path(spec.answer)
    if finished.returncode == 0 and answer.exists():
        return Answer(**json.loads(answer.read_text()))
    if finished.returncode in (-signal.SIGINT, 130):
        raise KeyboardInterrupt
    how = f"status {finished.returncode}"
    if finished.returncode < 0:
        how = f"signal {-finished.returncode}"
    return Answer(result=FAILED, error=f"its process ended with {how} and no answer")


def _monolithic(setting: _Setting, *, backward: bool) -> Plan:
    return _planned(setting, backward=backward, levels=(), inputs="device")


def _planned(setting: _Setting, *, backward: bool, **how: Any) -> Plan:
    *batch, heads, tokens, width = setting.query.shape
    return plan(
        tokens,
        n_keys=setting.key.shape[-2],
        heads=heads,
        kv_heads=setting.key.shape[-3],
        head_dim=width,
        value_dim=setting.value.shape[-1],
        batch=max(1, torch.Size(batch).numel()),
        dtype=setting.query.dtype,
        is_causal=setting.is_causal,
        device=setting.device,
        backward=backward,
        **how,
    )


def _needed_bytes(setting: _Setting) -> int:
    """What the monolithic call takes beyond its inputs: results and workspace."""
    forward: int = _monolithic(setting, backward=False).peak_bytes
    if not setting.backward:
        return forward
    rows = setting.query.numel() // setting.query.shape[-1]
    result = rows * setting.value.shape[-1] * setting.query.element_size()
    backward: int = _monolithic(setting, backward=True).peak_bytes
    return max(forward, backward + result)


def _affordable(setting: _Setting) -> bool:
    """Whether the unlimited monolithic call, which is only for comparison, fits in memory and ends
    soon."""
    seconds = _monolithic(setting, backward=False).predicted_seconds
    if setting.backward:
        seconds += _monolithic(setting, backward=True).predicted_seconds
    needed = _needed_bytes(setting)
    if setting.device.type == "cuda":
        inputs = (setting.query, setting.key, setting.value, setting.grad_out)
        needed += sum(t.numel() * t.element_size() for t in inputs if t is not None)
    fits = 2 * needed < backend_of(setting.device).free_bytes(setting.device)
    return bool(fits and seconds < PATIENCE_SECONDS)


def _is_recovered(setting: _Setting, ours: _Outcome) -> bool:
    return ours.errors is not None and ours.errors.worst() < _ACCEPTED[setting.query.dtype]


def _draw(setting: _Setting, outcomes: list[_Outcome], path: str) -> str | None:
    try:
        from quorum_attention.pictures import draw_recovery

        limited, ours, *free = outcomes
        needed = free[0].answer.peak_bytes if free and free[0].ran else _needed_bytes(setting)
        bars = [
            (
                limited.label,
                limited.answer.peak_bytes if limited.ran else needed,
                f"what it {'took' if limited.ran else 'needs'}; here: {limited.answer.result}",
                limited.ran,
            ),
            (
                ours.label,
                ours.answer.peak_bytes,
                f"what it took; here: {ours.answer.result}",
                ours.ran,
            ),
        ]
        report = ours.answer.report.get("backward") or ours.answer.report.get("forward") or {}
        tokens = max(setting.query.shape[-2], setting.key.shape[-2])
        shape = Decomposition(tokens, tuple(report.get("levels", ())))
        draw_recovery(
            path,
            decomposition=shape,
            is_causal=setting.is_causal,
            budget_bytes=setting.budget_bytes,
            bars=bars,
        )
    except ImportError:
        return None
    return path


def _as_json(
    setting: _Setting, outcomes: list[_Outcome], recovered: bool, picture: str | None
) -> dict[str, Any]:
    return {
        "call": _headline(setting),
        "budget_bytes": setting.budget_bytes,
        "recovered": recovered,
        "methods": [
            {
                "method": outcome.label,
                **asdict(outcome.answer),
                "errors": asdict(outcome.errors) if outcome.errors else None,
            }
            for outcome in outcomes
        ],
        "picture": picture,
    }


def _print(
    setting: _Setting, outcomes: list[_Outcome], recovered: bool, picture: str | None
) -> None:
    limited, ours = outcomes[:2]
    show_table(
        ["method", "result", *_figures(setting, ours)],
        [
            [outcome.label, outcome.answer.result, *_figures(setting, outcome).values()]
            for outcome in outcomes
        ],
        left=["result"],
        red=[number for number, outcome in enumerate(outcomes) if not outcome.ran],
    )
    if limited.ran:
        say(
            f"The budget was enough for the monolithic call: nothing to recover. "
            f"It took {format_bytes(limited.answer.peak_bytes)}; try a smaller --budget.",
        )
    else:
        say(f"torch, in its {limited.answer.stage}: {limited.answer.error}")
    if not ours.ran:
        where = f", in its {ours.answer.stage}" if ours.answer.stage else ""
        say(f"Quorum Attention{where}: {ours.answer.error}")
    say(_timed(outcomes))
    say(_counted(setting))
    for name, part in ours.answer.report.items():
        if part:
            levels = " x ".join(map(str, part["levels"])) or "none"
            say(
                f"{name}: levels {levels}, {part['units']} units of {part['heads_per_group']} "
                f"head(s), kernel {part['kernel']}, planned peak "
                f"{format_bytes(part['planned_peak_bytes'])} of "
                f"{format_bytes(part['budget_bytes'])}",
            )
    if ours.errors is not None:
        how = "every row's" if ours.errors.lse_is_exact else "sampled rows'"
        say(
            f"Errors are relative to float64 on sampled rows (log-sum-exp in float64: {how}): "
            f"{'right' if recovered else 'WRONG'}.",
        )
    drawn = picture or 'none; pip install "quorum-attention[draw]"'
    say(f"picture: {drawn}")


def _timed(outcomes: list[_Outcome]) -> str:
    """What the times are of."""
    said = (
        f"Times are of a first and a second call in one process, after small ones of {WARM_TOKENS} "
        f"tokens"
    )
    if any(len(outcome.answer.forward_seconds) == 1 for outcome in outcomes if outcome.ran):
        said += f" (no second one where the first took more than {PATIENCE_SECONDS:.0f} s)"
    return f"{said}."


def _figures(setting: _Setting, outcome: _Outcome) -> dict[str, str]:
    """By heading, what a table shows of a method besides its name and result."""
    answer, errors = outcome.answer, outcome.errors
    cells = {}
    passes = {"forward": answer.forward_seconds}
    if setting.backward:
        passes["backward"] = answer.backward_seconds
    for name, seconds in passes.items():
        for place, ordinal in enumerate(("first", "second")):
            there = place < len(seconds)
            cells[f"{name}: {ordinal}"] = format_seconds(seconds[place]) if there else "-"
    cells["peak memory"] = format_bytes(answer.peak_bytes) if outcome.ran else "-"
    results = {"out": "out"}
    if setting.backward:
        results |= {"dQ": "grad_query", "dK": "grad_key", "dV": "grad_value"}
    for short, name in results.items():
        error = None if errors is None else getattr(errors, name)
        cells[f"error: {short}"] = "-" if error is None else f"{error:.1e}"
    return cells
