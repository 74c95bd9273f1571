"""``run --ray`` with Ray in this process: the files are those of an ordinary run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.ray import FakeRay

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.ray import farm


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    made, threads = FakeRay(), torch.get_num_threads()
    monkeypatch.setattr(farm, "import_ray", lambda: made)
    yield made
    torch.set_num_threads(threads)  # tasks set those of their process, here this one


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    three = [
        torch.randn(2, *sizes) for sizes in ((4, 300, 16), (2, 300, 16), (2, 300, 8))
    ]
    out, lse = qa.attention_with_lse(*three, is_causal=True, enable_gqa=True)
    tensors = dict(zip(("query", "key", "value"), three, strict=True))
    tensors |= {"grad_out": torch.randn(2, 4, 300, 8), "out": out, "lse": lse}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def same(folder: Path) -> None:
    """The results of both ways, and there is nothing else."""
    a, b = (
        safetensors.torch.load_file(folder / f"{n}.safetensors")
        for n in ("plain", "farmed")
    )
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], atol=1e-5), name
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("chunks", "more"),
    [("1", ["--lse"]), ("7", ["--backward"]), ("", ["--out-dtype", "float64"])],
)
def test_as_without(
    inputs: Path, tmp_path: Path, ray: FakeRay, chunks: str, more: list[str]
) -> None:
    plain, farmed = tmp_path / "plain.safetensors", tmp_path / "farmed.safetensors"
    common = [str(inputs), "--causal", *more]
    assert main(["run", common[0], str(plain), *common[1:]]) == 0
    wish = ["--chunks", chunks] if chunks else []
    options = [
        "--ray",
        "auto",
        "--ray-workers",
        "3",
        "--budget",
        "1GiB",
        "--keep-every",
        "2",
    ]
    assert main(["run", common[0], str(farmed), *common[1:], *options, *wish]) == 0
    same(tmp_path)
    assert ray.asked == ["auto"]


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_stopped_run_is_resumed(
    inputs: Path,
    tmp_path: Path,
    ray: FakeRay,
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads that are complete are not computed again."""
    plain, farmed = tmp_path / "plain.safetensors", tmp_path / "farmed.safetensors"
    assert main(["run", str(inputs), str(plain), "--causal"]) == 0
    command = ["run", str(inputs), str(farmed), "--causal", "--keep-every", "1", "--chunks",
               str(chunks), "--ray", "local", "--ray-workers", "1"]  # fmt: skip
    each = 1 if chunks == 1 else 2 * chunks
    units: list[Any] = []
    get = ray.get

    def counted(ref: int) -> Any:
        units.append(ref)
        if len(units) == 3 * each + 1:
            raise KeyboardInterrupt
        return get(ref)

    monkeypatch.setattr(ray, "get", counted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main(command))
    assert not farmed.exists()
    assert main([*command, "--resume"]) == 0
    assert len(units) == 3 * each + 1 + each, "one of four heads was left"
    same(tmp_path)
