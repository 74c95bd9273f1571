"""Words that no command or option is: the command's own usage, and what was probably
meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quorum_attention.cli import COMMANDS, main, parser

PARSERS = parser()._subparsers._group_actions[0].choices
OPTIONS = [
    (command, option)
    for command, one in PARSERS.items()
    for option in one._option_string_actions
    if option.startswith("--") and len(option) > 6
]


def said_about(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    return usage, error


@pytest.mark.parametrize("command", COMMANDS)
def test_misspelt_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, error = said_about([command[:2] + command[3:], "--tokens", "5"], capsys)
    assert usage.startswith("usage: quorum-attention [-h]")
    assert error.endswith(f"did you mean {command}?")


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = said_about(["zzz"], capsys)
    assert error.endswith(
        f"there is no command 'zzz'; commands are {', '.join(COMMANDS)}"
    )


def test_misspelt_options_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where another argument is missing, and before it is said to be."""
    assert len(OPTIONS) > 50
    for command, option in OPTIONS:
        wrong = f"{option[:4]}{option[5:]}"
        usage, error = said_about([command, wrong, "1"], capsys)
        assert usage.startswith(f"usage: quorum-attention {command} ")
        assert error.startswith(
            f"quorum-attention {command}: error: there is no option {wrong};"
        )
        assert "did you mean --" in error


@pytest.mark.parametrize(
    "arguments", [["--verson"], ["plan", "--zzz=3", "--tokens", "5"]]
)
def test_other_unknown_options(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, error = said_about(arguments, capsys)
    assert "there is no option --" in error


@pytest.mark.parametrize("words", ["plan --tokens 5 a b", "doctor a b"])
def test_words_that_are_too_many(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usage, error = said_about(words.split(), capsys)
    command = words.split()[0]
    assert usage.startswith(f"usage: quorum-attention {command} ")
    assert error == f"quorum-attention {command}: error: too many words: a b"


def test_options_may_be_shortened() -> None:
    assert parser().parse_args(["plan", "--tok", "64"]).tokens == 64


def test_an_input_in_the_place_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an output the last input would be taken for it."""
    monkeypatch.chdir(tmp_path)
    names = [f"{name}.npy" for name in ("query", "key", "value")]
    for name in names:
        np.save(name, np.zeros((1, 1, 4, 8), np.float32))
    _, error = said_about(["run", *names], capsys)
    assert error.endswith("value.npy is named as an input: give the output behind it")


def test_an_estimate_of_no_length(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = said_about(["estimate", "--model", "config.json"], capsys)
    assert "give --tokens N" in error
    assert "--prompt N" in error


def test_a_file_of_torch_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what to write instead."""
    path = tmp_path / "call.pt"
    torch.save({"query": torch.zeros(1, 1, 4, 8)}, path)
    assert main(["run", str(path), str(tmp_path / "out")]) == 2
    assert "file of torch.save" in capsys.readouterr().err
