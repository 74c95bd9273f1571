"""Commands on a real terminal: their exit status, and what a person sees.

Where a command writes to a terminal it draws bars and knows how wide lines may be,
which no test with a pipe sees.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.docs import QWEN3_8B, ROOT, blocks, normal
from helpers.terminal import in_a_terminal, seen

# One process for all of them: an import of torch takes seconds, and the second window
# gets the plans of the first.
SEVERAL = """
import fcntl, struct, sys, termios
from quorum_attention.cli import main
from quorum_attention.progress import bars

bars._PATIENCE = 0.0
widths, *commands = sys.argv[1:]
for columns in widths.split():
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, int(columns), 0, 0))
    print("COLUMNS", columns)
    for command in commands:
        print("$", command)
        print("status", main(command.split()))
"""
WIDTHS = [80, 120]
COMMANDS = [
    "doctor",
    "plan --tokens 1M --causal --device cuda --budget 1GiB --census --draw plan.png",
    "plan --tokens 1M --causal --heads 32 --budget 1GiB --devices 8xH200,4xA100",
    "estimate --tokens 1M --causal --budget 1GiB --device cuda",
    "estimate --tokens 16K --device cuda --model config.json --memory 20GiB",
    "estimate --tokens 64K --lora 16 --device cuda --model config.json --memory 24GiB",
    "estimate --tokens 64K --device cuda --model config.json",
    "estimate --prompt 256K --device cuda --model config.json --memory 24GiB",
    "estimate --prompt 256K --device cuda --model config.json --memory 8GiB",
    "plan --tokens 1M --causal --device cuda --levels 7,7",
    "check dense --tokens 24 --forward-only",
    "run --device cpu in.safetensors out.safetensors",
    "run --device cpu --lse in.safetensors lse.safetensors",
]
# As `recover` measures: in a process of its own, with a bar from the start and under a
# limit.
LIMITED = """
from quorum_attention.bench import child
from quorum_attention.progress import bars

bars._PATIENCE = 0.0
answer = child.measure(child.Spec(
    "quorum", 4096, 4, 4, 32, "float32", True, backward=True, device="cpu",
    limit_bytes=12 << 20, budget_bytes=10 << 20, repeats=1, check=True, progress=True,
))
print(answer.status, answer.reason)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    tensors = {name: torch.randn(1, 2, 64, 16) for name in "qkv"}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path


def check_looks(written: str, lines: list[str], columns: int) -> None:
    assert "Traceback" not in written
    assert max(map(len, lines)) <= columns
    assert not any("━" in line for line in lines), "bars are erased"
    assert written.rfind("\x1b[?25h") >= written.rfind("\x1b[?25l"), (
        "the cursor is seen again"
    )


def check_tables(lines: list[str]) -> None:
    """Tables are not broken: what `recover` measured has a cell for each method on
    every line."""
    head = next(
        n
        for n, line in enumerate(lines)
        if "Quorum Attention" in line and ":" not in line
    )
    rows = [
        line
        for line in lines[head + 1 : head + 6]
        if re.match("memory|first|second", line)
    ]
    assert len(rows) >= 3
    assert {len(line) for line in rows} == {len(lines[head])}, (
        "columns are aligned to the right"
    )


@pytest.mark.slow
def test_commands_in_a_terminal(folder: Path) -> None:
    arguments = ["-c", SEVERAL, " ".join(map(str, WIDTHS)), *COMMANDS]
    status, written = in_a_terminal(
        arguments, WIDTHS[0], folder, PYTHONPATH=f"{ROOT}/src"
    )
    assert status == 0, written
    _, *windows = re.split(r"COLUMNS \d+\r\n", written)
    statuses = ["status 0"] * len(COMMANDS)
    for columns, shown in zip(WIDTHS, windows, strict=True):
        lines = seen(shown)
        assert [line for line in lines if line.startswith("status")] == statuses
        printed = [line for line in lines if not line.startswith("$")]
        check_looks(shown, printed, columns)
        # Longer lines are broken where the window ends, and not before.
        assert max(map(len, printed)) > columns - 20


@pytest.mark.slow
def test_a_bar_takes_no_memory_of_a_limited_process(folder: Path) -> None:
    """Its thread's stack was more than what the process may take beside the call's
    tensors."""
    status, written = in_a_terminal(
        ["-c", LIMITED], 80, folder, PYTHONPATH=f"{ROOT}/src"
    )
    assert status == 0, written
    assert "━" in written, "a bar was drawn"
    assert "ok " in seen(written), written
    check_looks(written, seen(written), 80)


@pytest.mark.slow
def test_the_demonstration_in_a_terminal(folder: Path) -> None:
    """What `make demo` runs, of shorter heads, prints what the first page shows.

    It has as many bytes as the call that stands there: the limit on memory is the one
    that the command chooses itself.
    """
    demo = re.search(
        r"\$\(BIN\)/quorum-attention (.+)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert demo is not None
    shorter = ["--tokens", "2048", "--heads", "64", "--device", "cpu"]
    arguments = ["-m", "quorum_attention", *demo[1].split(), *shorter]
    status, written = in_a_terminal(arguments, 80, folder, PYTHONPATH=f"{ROOT}/src")
    assert status == 0, written
    lines = seen(written)
    check_looks(written, lines, 80)
    check_tables(lines)
    (page,) = [b for b in blocks() if b.page == "index.md" and b.language == "console"]
    command, _, output = page.text.partition("\n")
    assert command == f"$ quorum-attention {demo[1]}"
    assert "Matches float64 on sampled rows: yes." in " ".join(output.split())
    assert normal("\n".join(lines)) == normal(output)
    assert (folder / "quorum-attention-out" / "recover.png").exists()
