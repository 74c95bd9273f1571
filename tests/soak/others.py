"""The kinds of calls that need other processes, or another library."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from soak.kinds import DTYPES
from soak.outcome import Kind, Outcome, Where, compare, drawn_inputs, textbook

_PATIENCE = 300.0


def without(*modules: str) -> str:
    """Which of some modules are not here, in words; "" if all are."""
    gone = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(gone)} not installed" if gone else ""


def devices(where: Where, draw: random.Random) -> Outcome:
    """Calls on two devices, a process each; some interrupted, some workers killed in the middle."""
    outcome = Outcome()
    names = ["cpu", "cpu"] if where.device == "cpu" or draw.random() < 0.5 else ["cuda:0"]
    for _ in range(4):
        dtype, causal = draw.choice(DTYPES), draw.random() < 0.6
        three, upstream = drawn_inputs(draw, dtype, "cpu", 900)
        exact = textbook(*three, upstream, is_causal=causal)
        options: dict[str, Any] = {"is_causal": causal, "enable_gqa": True, "devices": names}
        kill = None
        if len(names) > 1 and draw.random() < 0.15:
            kill = _kill_soon(draw)
        try:
            out = qa.attention(*three, **options)
            grads = torch.autograd.grad(out, three, upstream)
        finally:
            if kill is not None:
                kill.cancel()
                kill.join()
                outcome.events.append("worker killed")
        outcome.calls += 2
        compare("out on devices", out, exact[0], dtype, outcome)
        for name, found, wanted in zip("QKV", grads, exact[2:], strict=True):
            compare(f"d{name} on devices", found, wanted, dtype, outcome)
    if draw.random() < 0.05:
        from quorum_attention import pool

        pool.close()
        outcome.events.append("pool closed")
    return outcome


def start_workers() -> None:
    """Those of two CPU devices, where some are missing."""
    q = torch.randn(1, 2, 300, 8)
    qa.attention(q, q, q, devices=["cpu", "cpu"])


def _kill_soon(draw: random.Random) -> threading.Timer | None:
    """Kills one worker a little later; the call goes on without it."""
    workers = [p.pid for p in multiprocessing.active_children() if p.pid is not None]
    if len(workers) < 2:
        return None
    timer = threading.Timer(draw.random() * 0.05, _kill, (draw.choice(workers), signal.SIGKILL))
    timer.start()
    return timer


def _kill(number: int, what: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, what)


_CHILD = """
import random, sys
sys.path[:0] = [{tests!r}, {source!r}]
import torch
torch.set_num_threads(1)
from pathlib import Path
from soak.kinds import calls
from soak.outcome import Where
where = Where({device!r}, Path({folder!r}), Path({source!r}), Path({tests!r}))
found = calls(where, random.Random({seed}))
print(found.calls, *found.wrong, sep="\\n", flush=True)
"""


def children(where: Where, draw: random.Random) -> Outcome:
    """A fresh process makes calls and ends; what it printed on its way out counts."""
    outcome = Outcome()
    code = _CHILD.format(
        tests=str(where.tests), source=str(where.source), folder=str(where.folder),
        device=where.device, seed=draw.getrandbits(40),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        timeout=_PATIENCE,
    )  # fmt: skip
    count, *wrong = done.stdout.splitlines() or ["0"]
    outcome.calls = int(count)
    outcome.wrong += ["\n".join(wrong)] if wrong else []
    if done.returncode or "Error" in done.stderr:
        outcome.wrong.append(f"a child ended with {done.returncode}: {done.stderr[-2000:]}")
    return outcome


def forks(where: Where, draw: random.Random) -> Outcome:
    """A fork of this process, with all that it has remembered, makes a call and is right."""
    three, upstream = drawn_inputs(draw, torch.float32, "cpu", 300)
    exact = textbook(*three, upstream, is_causal=True)
    outcome = Outcome(calls=2)
    number = os.fork()
    if not number:
        code = 1
        try:
            signal.alarm(60)
            out = qa.attention(*three, is_causal=True, enable_gqa=True)
            found = torch.autograd.grad(out, three, upstream)
            for name, got, wanted in zip(
                "OQKV", (out, *found), (exact[0], *exact[2:]), strict=True
            ):
                compare(name, got, wanted, torch.float32, outcome)
            code = 3 if outcome.wrong else 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    if status:
        outcome.wrong.append(f"a fork ended with {status} (3: wrong, -14: hung for a minute)")
    return outcome


def ranks(where: Where, draw: random.Random) -> Outcome:
    """Two ranks of a Gloo group make the random calls of tests/helpers_ranks.py."""
    from helpers_ranks import spawn

    count = 30
    with tempfile.TemporaryDirectory(dir=where.folder) as folder:
        try:
            spawn(_on_a_rank, 2, Path(folder), draw.getrandbits(30), count)
        except Exception as error:
            return Outcome(2 * count, [f"ranks: {error}"])
    return Outcome(2 * count)


def _on_a_rank(_: int, seed: int, count: int) -> None:
    from helpers_ranks import random_calls

    random_calls(seed, count)


def models(where: Where, draw: random.Random) -> Outcome:
    """A tiny model of Transformers with this attention, its logits and gradients."""
    from helpers_models import DECODERS, VOCABULARY, assert_as_close_as_eager, register_all, tiny

    register_all()
    torch.manual_seed(draw.getrandbits(40))
    kind = draw.choice(["llama", "mistral", "gemma2", "qwen3"])
    assert kind in DECODERS
    outcome = Outcome(calls=4)
    model, ids = tiny(kind), torch.randint(1, VOCABULARY, (2, draw.choice([40, 150])))
    name = draw.choice(["quorum", "cut_once"]) if ids.shape[1] >= 128 else "quorum"
    try:
        assert_as_close_as_eager(model, name, ids)
    except AssertionError as error:
        outcome.wrong.append(f"{kind}, {name}, {tuple(ids.shape)}: {str(error)[:500]}")
    return outcome


def files(where: Where, draw: random.Random) -> Outcome:
    """``run`` from files to files, stopped by signals at random instants and resumed."""
    folder = Path(tempfile.mkdtemp(prefix="files-", dir=where.folder))
    try:
        return _files(where, draw, folder)
    finally:
        shutil.rmtree(folder)


def _files(where: Where, draw: random.Random, folder: Path) -> Outcome:
    from safetensors.torch import load_file, save_file

    outcome, g = Outcome(), torch.Generator().manual_seed(draw.getrandbits(40))
    heads, n, d = draw.choice([2, 4, 6]), draw.choice([150, 400, 700]), draw.choice([16, 32])
    dtype, causal = draw.choice(DTYPES[:3]), draw.random() < 0.5
    q, k, v, do = (torch.randn(1, heads, n, d, generator=g).to(dtype) for _ in range(4))
    exact = textbook(q, k, v, do, is_causal=causal)
    save_file({"q": q, "k": k, "v": v}, folder / "qkv.safetensors")
    options = ["--device", where.device, "--depth", "1", "--keep-every", "1"]
    options += ["--causal"] if causal else []
    forward = ["qkv.safetensors", "out.safetensors", "--lse"]
    if not _run(forward + options, folder, draw, outcome):
        return outcome
    found = load_file(folder / "out.safetensors")
    outcome.calls += 1
    compare("out of a file", found["out"], exact[0], dtype, outcome)
    compare("lse of a file", found["lse"], exact[1], dtype, outcome)
    save_file({"out": found["out"], "lse": found["lse"], "do": do}, folder / "f.safetensors")
    backward = ["--backward", "qkv.safetensors", "f.safetensors", "grads.safetensors"]
    if not _run(backward + options, folder, draw, outcome):
        return outcome
    grads = load_file(folder / "grads.safetensors")
    outcome.calls += 1
    if len(grads) != 3:
        outcome.wrong.append(f"gradients are {list(grads)}")
    for (name, grad), wanted in zip(sorted(grads.items()), _by_name(exact[2:]), strict=False):
        compare(f"{name} of a file", grad, wanted, dtype, outcome)
    left = {p.name for p in folder.iterdir()}
    left -= {"qkv.safetensors", "out.safetensors", "f.safetensors", "grads.safetensors"}
    if left:
        outcome.wrong.append(f"left beside the results: {sorted(left)}")
    return outcome


def _by_name(three: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of query, key and value, in the order of these names."""
    return [three[1], three[0], three[2]]


_lasted = [6.0]


def _run(arguments: list[str], folder: Path, draw: random.Random, outcome: Outcome) -> bool:
    """Whether the command came to its end, after up to three signals."""
    command = [sys.executable, "-m", "quorum_attention", "run", *arguments, "--resume"]
    for kills in (*(range(draw.choice([0, 1, 2, 3]))), None):
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        try:
            _, said = process.communicate(timeout=_PATIENCE if kills is None else
                                          draw.random() * 1.2 * _lasted[0])  # fmt: skip
        except subprocess.TimeoutExpired:
            process.send_signal(number if kills is not None else signal.SIGKILL)
            _, said = process.communicate()
            if kills is None:
                outcome.wrong.append(f"{arguments} did not end in {_PATIENCE:.0f} s")
                return False
            outcome.events.append(f"run stopped by {number.name}")
            # What was stopped before the command had begun ends as Python does.
            if process.returncode not in (0, 1, -number, 128 + number):
                outcome.wrong.append(f"{arguments}: {number.name}, {process.returncode}, {said}")
                return False
            continue
        if process.returncode:
            outcome.wrong.append(f"{arguments} ended with {process.returncode}: {said[-1500:]}")
            return False
        _lasted[0] = time.monotonic() - began
        return True
    return True


def _no_fork(where: Where) -> str:
    return "" if where.device == "cpu" and not torch.cuda.is_available() else "no fork can use CUDA"


KINDS = [
    Kind("devices", 10, devices),
    Kind("children", 6, children),
    Kind("forks", 1, forks, _no_fork),
    Kind("ranks", 5, ranks, lambda where: "" if torch.distributed.is_available() else "no Gloo"),
    Kind("models", 5, models, lambda where: without("transformers")),
    Kind("files", 1, files, lambda where: without("safetensors", "rich"), beside=True),
]
