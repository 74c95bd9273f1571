"""Every command that the documentation names can be given; most are given here, small."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers_docs import ROOT, Command, blocks, commands, normal

from quorum_attention.cli import main, parser, recover

OURS = sorted({c.text for c in commands() if c.text.startswith("quorum-attention")})
OTHERS = [c for c in commands() if not c.text.startswith("quorum-attention")]
# Commands of minutes, or that measure the machine: only whether they can be given is asked.
NOT_RUN = ("quorum-attention bench", "quorum-attention calibrate")
SHORT = {
    "recover": ["--tokens", "512", "--heads", "1", "--budget", "64MiB", "--forward-only"],
    "check": ["--tokens", "64", "--forward-only"],
}
MODULE = """
import torch

def my_attention(query, key, value, *, is_causal, scale):
    scores = scale * (query @ key.mT)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
"""


CONFIG = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip


def filled(text: str) -> list[str]:
    """The arguments of a command, with names in place of its placeholders."""
    text = re.sub(r"(?<= run)( IN OUT)?$", " in.safetensors out.safetensors", text)
    text = re.sub(r"--tokens N\b", "--tokens 4096", text).replace("NAME", "my_module:my_attention")
    return shlex.split(text)[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "docs" / "images").mkdir(parents=True)
    tensors = {name: torch.randn(1, 2, 64, 16) for name in "qkv"}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    # Children import what is tested, also where PYTHONPATH is relative.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", OURS)
def test_commands_can_be_given(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Torch without a limit is seen below, where make demo is.
    monkeypatch.setattr(recover, "_affordable", lambda setting: False)
    arguments = filled(text)
    more = SHORT.get(arguments[0], [])
    parser().parse_args([*arguments, *more])
    if text.startswith(NOT_RUN) or "--ray" in arguments:  # a cluster: tests/farm begins one
        return
    assert main([*arguments, *more]) == 0
    assert capsys.readouterr().out.strip()
    named = [word for word in arguments if word.endswith(("out.safetensors", ".png"))]
    assert all((folder / name).stat().st_size > 0 for name in named)


def test_commands_that_are_not_run_are_few() -> None:
    assert {text.split()[1] for text in OURS if text.startswith(NOT_RUN)} == {"bench", "calibrate"}
    table = re.findall(r"^\| `quorum-attention (\w+)", (ROOT / "README.md").read_text(), re.M)
    every = set(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    assert set(table) == every, "the table of commands has them all"


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_other_commands_exist(command: Command) -> None:
    """Targets of make, extras of pip, options of benchmarks: nothing is run of them."""
    tool, *arguments = shlex.split(command.text)
    if tool == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif tool == "pip":
        (extra,) = re.findall(r"\[([\w-]+)\]", command.text)
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    else:
        source = (ROOT / arguments[0]).read_text()
        for option in (word for word in arguments if word.startswith("--")):
            assert f'"{option}"' in source, option


def test_make_demo_is_what_the_readme_shows(capsys: pytest.CaptureFixture[str], folder) -> None:
    (shown,) = [b for b in blocks() if b.page == "README.md" and b.language == "console"]
    command, _, output = shown.text.partition("\n")
    demo = re.search(r"quorum-attention (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert demo is not None
    assert command == f"$ quorum-attention {demo[1]}"
    # As there, torch runs out of memory in its forward, and heads are all that is cut.
    small = ["--tokens", "1024", "--heads", "64", "--budget", "12MiB", "--device", "cpu"]
    assert main([*shlex.split(demo[1]), *small]) == 0
    printed = capsys.readouterr().out.replace("every row's", "sampled rows'")
    assert normal(printed) == normal(output)
    assert Path("quorum-attention-out/recover.png").exists()


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command has --json, says the README."""
    assert main(["plan", "--tokens", "4096", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["n_tasks"] >= 1
    for name, one in parser()._subparsers._group_actions[0].choices.items():  # type: ignore
        assert "--json" in one._option_string_actions, name
