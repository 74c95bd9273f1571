"""Every command and block of the documentation runs, small, and prints what stands
below it."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.docs import (
    OTHER_PROJECTS,
    QWEN3_8B,
    ROOT,
    blocks,
    commands,
    my_attention,
    normal,
)
from helpers.kernels import taken_as_tried

from quorum_attention.bench.experiments import EXPERIMENTS
from quorum_attention.bench.measurement import OK, OUT_OF_MEMORY, UNSUPPORTED
from quorum_attention.cli import main, parser
from quorum_attention.execution.device.backend import Backend, TrialSizes
from quorum_attention.planner import calibration

OURS = sorted({c.text for c in commands() if c.text.startswith("quorum-attention")})
# Run by tests of their own, below and in tests/cli; on Ray by tests/on_ray.
APART = tuple(f"quorum-attention {name}" for name in ("bench", "calibrate", "recover"))
SHORT = {
    "bench": shlex.split(
        "--device cpu --quick --max-tokens 128 --tokens 64 --heads 1 --head-dim 16"
    ),
    "check": ["--tokens", "64", "--forward-only"],
}
MODULE = f"import torch\nfrom typing import Any\n\n{inspect.getsource(my_attention)}"


def filled(text: str) -> list[str]:
    """The arguments of a command, with names in place of its placeholders."""
    text = re.sub(r"(?<= run)( IN OUT)?$", " in.safetensors out.safetensors", text)
    text = re.sub(r"--(tokens|prompt) N\b", r"--\1 4096", text).replace(
        "NAME", "my_module:my_attention"
    )
    return shlex.split(text)[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "docs" / "images").mkdir(parents=True)
    tensors = {name: torch.randn(1, 2, 64, 16) for name in "qkv"}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    # Children import what is tested, also where PYTHONPATH is relative.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# Of commands that differ in their placeholders alone, one.
DISTINCT = list({tuple(filled(text)): text for text in OURS}.values())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("text", DISTINCT)
def test_commands_can_be_given(
    text: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Nor is a kernel tried in the interpreter: tests/cli/test_commands.py has the
    # doctor do that.
    taken_as_tried(monkeypatch, "native")
    arguments = filled(text)
    more = SHORT.get(arguments[0], [])
    parser().parse_args([*arguments, *more])
    if text.startswith(APART) or "--ray" in arguments:
        return
    assert main([*arguments, *more]) == 0
    assert capsys.readouterr().out.strip()
    named = [word for word in arguments if word.endswith(("out.safetensors", ".png"))]
    assert all((folder / name).stat().st_size > 0 for name in named)


QWEN3_STEP = "--tokens 256K --lora 16 --host-memory 256GiB"
QWEN3_PROMPT = "--prompt 256K --generate 500"
# By the pages that quote the answer.
QUOTED_ESTIMATES = {
    f"{QWEN3_STEP} --memory 80GiB": ("tutorial", "long-context"),
    f"{QWEN3_STEP} --memory 24GiB": ("long-context",),
    f"{QWEN3_PROMPT} --memory 24GiB --host-memory 128GiB": ("long-prompts",),
    f"{QWEN3_PROMPT} --memory 6GiB --host-memory 64GiB": ("long-prompts",),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", QUOTED_ESTIMATES)
def test_pages_quote_the_answer_of_an_estimate(
    options: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guide's answer to "will it fit?" goes stale when the estimate changes."""
    command = f"estimate --model config.json --device cuda {options}"
    assert main(command.split()) == 0
    answer = re.search(r"^(fits|does not fit) in .*", capsys.readouterr().out, re.M)
    assert answer is not None
    for page in QUOTED_ESTIMATES[options]:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert answer[0] in " ".join(text.split()), page


def test_commands_that_have_tests_of_their_own_are_few() -> None:
    assert all(any(text.startswith(one) for text in OURS) for one in APART)
    table = re.findall(
        r"^\| `quorum-attention (\w+)",
        (ROOT / "docs" / "commands.md").read_text(),
        re.M,
    )
    every = parser()._subparsers._group_actions[0].choices
    assert set(table) == set(every), "the table of commands has them all"
    for name, one in every.items():
        assert "--json" in one._option_string_actions, name


@pytest.mark.slow
def test_bench_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All experiments, in processes of their own."""
    given = [filled(text) for text in OURS if text.startswith("quorum-attention bench")]
    first = min(given, key=len)
    assert first == ["bench"], "all experiments"
    assert main([*first, *SHORT["bench"]]) == 0
    printed = capsys.readouterr()
    titles = re.findall(
        r"^## (.+)$", (folder / "bench-results/report.md").read_text(), re.M
    )
    assert len(titles) >= len(EXPERIMENTS)
    assert all(title in printed.out for title in titles)
    found = json.loads((folder / "bench-results/results.json").read_text())[
        "rows"
    ].values()
    assert {one["experiment"] for one in found} == {"accuracy", "cost"}
    assert {one["answer"]["status"] for one in found} <= {
        OK,
        OUT_OF_MEMORY,
        UNSUPPORTED,
    }
    for name in re.findall(r"^wrote (.+)$", printed.out, re.M):
        assert (folder / name).stat().st_size > 0


@pytest.mark.slow
def test_calibrate_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real calls, short ones and once; what a busy machine does to them is not asked
    here."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(folder / "cache"))
    sizes = TrialSizes(256, 256, 1 << 20, 0.0)
    monkeypatch.setattr(Backend, "trial_sizes", lambda cpu, device: sizes)
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    (text,) = {text for text in OURS if text.startswith("quorum-attention calibrate")}
    try:
        assert main([*filled(text), "--device", "cpu"]) == 0
        printed = capsys.readouterr().out
        assert "plans use it from now on" in printed
        assert "head_dim 128 backward" in printed
        assert (folder / "cache" / "calibration.json").exists()
        assert calibration.hardware_of(torch.device("cpu"), torch.float32, 64).measured
    finally:
        monkeypatch.undo()
        calibration._stored_entries.cache_clear()
        calibration.hardware_of.cache_clear()
        calibration.rates_known.cache_clear()


BLOCKS = list(blocks())
PAGES = sorted({block.page for block in BLOCKS})
# What a page's blocks need and do not show: a call's tensors, packed documents, a model.
# Blocks import torch and this package themselves.
TOKENS, HEADS = 320, 2


def model() -> Any:
    """A decoder of Transformers; None where it is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64) | {"head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=100, **sizes, **heads)
    )


def prelude(*, with_model: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (1, HEADS, TOKENS, 64)
    q, k, v, grad_out = (torch.randn(shape).half() for _ in range(4))
    return {
        "q": q, "k": k, "v": v, "grad_out": grad_out, "my_attention": my_attention,
        "ids": torch.arange(TOKENS) // 100, "tokens": torch.randint(100, (1, TOKENS)),
        "model": model() if with_model else None,
    }  # fmt: skip


def small(source: str) -> str:
    """The block on fewer tokens: the sizes of its tensors are all that is changed."""
    return source.replace(
        "torch.randn(1, 4, 4096, 64,", f"torch.randn(1, {HEADS}, {TOKENS}, 64,"
    )


def can_run(source: str) -> bool:
    """Whether what the block needs beyond this package is installed: the tests' extra
    has it, but for other projects, whose blocks test_programs.py runs."""
    if any(name in source for name in OTHER_PROJECTS):
        return False
    needs = ("transformers import", "long_context(")
    return not any(x in source for x in needs) or find_spec("transformers") is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_they_show(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, as someone reads them; a block of text after one of Python is what it
    printed."""
    monkeypatch.chdir(tmp_path)
    if any("NativeKernel" in block.text for block in BLOCKS if block.page == page):
        pytest.importorskip("triton")
    models = any("model" in block.text for block in BLOCKS if block.page == page)
    names, printed = prelude(with_model=models), ""
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.language == "python":
            if block.not_run is not None or not can_run(block.text):
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(small(block.text), str(block), "exec"), names)
            printed = out.getvalue()
        elif block.language == "text":
            assert normal(printed) == normal(block.text), block


# The pages that somebody with a problem reads first.
FRONT_DOOR = (
    "README.md", "index.md", "tutorial.md", "long-context.md", "long-prompts.md",
    "masks.md", "devices.md", "distributed.md", "files.md", "programs.md",
    "transformers.md", "budget.md", "commands.md", "versions.md",
)  # fmt: skip


def test_blocks_fit_a_terminal_of_80_columns() -> None:
    """In a narrower window a line that is longer is broken, or cut."""
    assert set(FRONT_DOOR) <= set(PAGES)
    wide = [
        f"{block}: {line}"
        for block in BLOCKS
        if block.page in FRONT_DOOR
        for line in block.text.splitlines()
        if len(line) > 80
    ]
    assert not wide


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for block in BLOCKS if block.not_run is not None]
    assert len(left_out) <= 2
    assert all(len(block.not_run or "") > 10 for block in left_out)
