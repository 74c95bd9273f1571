"""Every example runs, and prints what it says."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.docs import ROOT
from safetensors.torch import load_file, save_file


@pytest.mark.slow
def test_quickstart() -> None:
    """As it stands: its sizes and its budget are what it is about."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^forward:\n  kernel: ", done.stdout, re.M)
    assert re.search(r"^backward:\n  kernel: ", done.stdout, re.M)
    last = done.stdout.splitlines()[-1]
    assert last == "output (1, 8, 4096, 64) gradient of the keys (1, 8, 4096, 64)"


@pytest.mark.slow
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """The losses of five steps are the same, so gradients are summed and labels shifted
    as they should be."""
    losses: list[list[str]] = []
    for n_ranks in (1, 3):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--standalone", "--nproc-per-node", str(n_ranks)),
                str(ROOT / "examples" / "train_ranks.py"),
            ],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "src"),
                "CUDA_VISIBLE_DEVICES": "",
                "TMPDIR": str(tmp_path),  # torchrun leaves a folder
            },
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append(re.findall(r"^step \d: loss (.*)$", done.stdout, re.M))
    assert len(losses[0]) == 5
    torch.testing.assert_close(
        torch.tensor([float(loss) for loss in losses[1]]),
        torch.tensor([float(loss) for loss in losses[0]]),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.slow
def test_long_prompt() -> None:
    """The text is computed once, and each question is answered."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "long_prompt.py"), "--answer", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2,000 tokens in" in done.stdout
    assert done.stdout.count("3 tokens of an answer") == 2


def weights(width: int, words: int) -> dict[str, torch.Tensor]:
    """A model of the example's shape with few words and random numbers."""
    made = {
        f"embeddings.{name}_embeddings.weight": torch.randn(n, width)
        for name, n in (("word", words), ("position", 512), ("token_type", 2))
    }
    attention = (
        f"attention.{name}" for name in ("self.query", "self.key", "self.value")
    )
    linear = dict.fromkeys((*attention, "attention.output.dense"), (width, width))
    linear |= {"intermediate.dense": (64, width), "output.dense": (width, 64)}
    layers = [f"encoder.layer.{layer}" for layer in range(2)]
    for layer in layers:
        for name, (out, into) in linear.items():
            made[f"{layer}.{name}.weight"] = torch.randn(out, into) * into**-0.5
            made[f"{layer}.{name}.bias"] = torch.zeros(out)
    norms = [
        f"{x}.{y}.LayerNorm" for x in layers for y in ("attention.output", "output")
    ]
    for name in ("embeddings.LayerNorm", *norms):
        made[f"{name}.weight"], made[f"{name}.bias"] = (
            torch.ones(width),
            torch.zeros(width),
        )
    return made


def test_real_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its whole way on a stand-in for the weights, which are 84 MB."""
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("real_activations")
    model = tmp_path / "carrier" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").touch()
    vocabulary = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"abcdefghijklmnopqrstuvwxyz",
        "##e",
        "##s",
        "def",
    ]
    (model / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    save_file(weights(384, len(vocabulary)), model / "model.safetensors")
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(example, "CARRIER", "carrier")
    arguments = [
        "x",
        "--tokens",
        "700",
        "--layer",
        "1",
        "--out",
        str(tmp_path / "a.safetensors"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(
        SystemExit, match="is not the file this example was written for"
    ):
        example.main()
    monkeypatch.setattr(example, "SHA256", digest)
    example.main()
    printed = capsys.readouterr().out
    assert printed.startswith("layer 1, (1, 12, 700, 32), fp32: ")
    assert len(re.findall(r" [0-9.e+-]+ +[0-9.e+-]+$", printed, re.M)) == 10
    written = load_file(tmp_path / "a.safetensors")
    assert {name: tuple(t.shape) for name, t in written.items()} == dict.fromkeys(
        ("query", "key", "value"), (1, 12, 700, 32)
    )


def in_kind(text: str) -> list[str]:
    """Lines of output without their numbers, units of bytes and widths of columns."""
    plain = re.sub(r"[\d.,]*\d( (bytes|[KMG]iB))?", "#", text)
    return [" ".join(line.split()) for line in plain.splitlines()]


def sizes_in(text: str) -> list[float]:
    """All sizes in bytes that a text names, in order."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    found = re.findall(r"([\d.]+) ([KMG]iB)", text)
    return [float(number) * units[unit] for number, unit in found]


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.slow
def test_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what it shipped with, but for its numbers, of a shorter text with a
    smaller chunk of the loss; and in both the step after the change takes much less,
    and computes the same loss."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("quorum_attention.recipes.step_estimate.LOSS_BYTES", 16 << 20)
    book = json.loads(
        (ROOT / "examples" / "train_long.ipynb").read_text(encoding="utf-8")
    )
    names: dict[str, Any] = {}
    shipped, executed = [], []
    for cell in (cell for cell in book["cells"] if cell["cell_type"] == "code"):
        shipped.append("".join("".join(output["text"]) for output in cell["outputs"]))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]).replace("8192", "384"), names)
        executed.append(printed.getvalue())
    assert [*map(in_kind, executed)] == [*map(in_kind, shipped)]
    for outputs in (shipped, executed):
        text = "".join(outputs)
        assert "chunked loss: " in text
        before, *after = losses_in(text)
        assert after[0] == pytest.approx(before, rel=1e-3)
        assert after == sorted(after, reverse=True)
        plain, ours = sizes_in(outputs[-1])[:2]
        assert ours < 0.6 * plain


# A notebook, its sizes, and those of a test.
NOTEBOOKS = {
    "long_prompt": {"8192": "384"},
    "diffusion": {"SIDE = 64": "SIDE = 12"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each cell as it is stored, with other numbers; memory is saved there."""
    pytest.importorskip("transformers")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    path = ROOT / "examples" / f"{name}.ipynb"
    book = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    n_pictures = 0
    stored_text = ""
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        for size, smaller in NOTEBOOKS[name].items():
            source = source.replace(size, smaller)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(source, names)
        texts = [output.get("text", []) for output in cell["outputs"]]
        stored = "".join("".join(text) for text in texts)
        assert in_kind(printed.getvalue()) == in_kind(stored)
        stored_text += stored
        n_pictures += sum("image/png" in o.get("data", ()) for o in cell["outputs"])
    assert n_pictures == 1
    (plain, ours) = re.findall(r"as it comes: (\d+) MiB, now: (\d+)", stored_text)[0]
    assert int(ours) < 0.5 * int(plain)


@pytest.mark.slow
def test_train_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With random weights, and with weights and a text of one's own; the loss falls,
    and what was trained is saved, and loaded again."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    monkeypatch.syspath_prepend(ROOT / "examples")
    folder = tmp_path / "model"
    example = importlib.import_module("train_long")
    sizes = {"num_hidden_layers": 1, "vocab_size": 300}
    monkeypatch.setitem(example.SHAPES, "small", {**example.SHAPES["small"], **sizes})
    Qwen3ForCausalLM(Qwen3Config(**example.SHAPES["small"])).save_pretrained(folder)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (tmp_path / "text").write_text("to be or not to be that is the question " * 30)
    own = ["--model", str(folder), "--text", str(tmp_path / "text")]
    for more in ([], own):
        monkeypatch.setattr(
            sys, "argv", ["x", "--tokens", "200", "--steps", "4", *more]
        )
        example.main()
        losses = re.findall(
            r"^step \d: 200 tokens, loss ([\d.]+)", capsys.readouterr().out, re.M
        )
        assert len(losses) == 4
        assert float(losses[-1]) < float(losses[0])
    trained = f"{folder}-trained"
    if importlib.util.find_spec("peft") is None:
        model = AutoModelForCausalLM.from_pretrained(trained)
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder), trained
        )
    text = (tmp_path / "text").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(trained)(text, return_tensors="pt").input_ids[
        :, :200
    ]
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() < float(
            losses[-1]
        )  # of the step before the last
    with pytest.raises(SystemExit):  # it is there already
        example.main()
    monkeypatch.setattr(sys, "argv", ["x", "--text", "text"])
    with pytest.raises(SystemExit):
        example.main()
