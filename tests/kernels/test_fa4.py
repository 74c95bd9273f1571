"""FlashAttention-4 as a kernel: all but its own functions, which run on a GPU
(tests/gpu)."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from helpers.fa4 import check_overflow_of_scores, stand_in
from helpers.masks import check
from helpers.processes import run_python

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels import Call, CallShape, fa4, get_kernel
from quorum_attention.kernels.select import (
    LONG_BACKWARD_FLOPS,
    LONG_FLOPS,
    select_kernel,
)

__all__ = ["stand_in"]
CALL = CallShape("cuda", torch.float16, 4, 4, 64, 64, True, True)
CUDA = torch.device("cuda")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "version", lambda: "4.0.0b36")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_type": "cpu"}, "NVIDIA GPUs"),
        ({"dtype": torch.float32}, "float16 and bfloat16, not torch.float32"),
        ({"head_dim": 73}, "multiples of 8 up to 256, not 73"),
        ({"head_dim": 264, "value_dim": 264}, "multiples of 8 up to 256, not 264"),
        (
            {"head_dim": 80, "value_dim": 80},
            "gradient of query is wrong for head dimension 80",
        ),
        ({"value_dim": 32}, "equal head dimensions, or 192 and 128, not 64 and 32"),
        ({"kv_heads": 2, "head_dim": 192, "value_dim": 128}, "where heads are grouped"),
    ],
)
def test_what_it_cannot_run_it_refuses_in_words(installed, change, words) -> None:  # type: ignore[no-untyped-def]
    assert words in str(get_kernel("fa4").refusal(replace(CALL, **change)))


def test_without_the_package_it_says_what_to_install(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fa4, "version", lambda: None)
    assert 'pip install ".[fa4]"' in str(get_kernel("fa4").refusal(CALL))
    assert select_kernel("auto", CALL, CUDA, tried=False, flops=1e15).name == "cudnn"


@pytest.mark.parametrize(("major", "runs"), [(8, False), (9, True), (10, True)])
def test_auto_takes_it_for_long_calls_on_hopper(
    installed, monkeypatch, major, runs
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    assert (get_kernel("fa4").refusal(CALL) is None) is runs
    long = select_kernel("auto", CALL, CUDA, tried=False, flops=LONG_FLOPS)
    short = select_kernel("auto", CALL, CUDA, tried=False, flops=LONG_FLOPS / 2)
    assert (long.name == "fa4") is (major == 9)
    assert short.name != "fa4"


def test_auto_takes_it_for_shorter_calls_in_the_backward(
    installed, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def chosen(flops: float, backward: bool) -> str:
        return select_kernel(
            "auto", CALL, CUDA, tried=False, flops=flops, backward=backward
        ).name

    assert chosen(LONG_BACKWARD_FLOPS, backward=True) == "fa4"
    assert chosen(LONG_BACKWARD_FLOPS, backward=False) != "fa4"
    assert chosen(LONG_BACKWARD_FLOPS / 2, backward=True) != "fa4"


def test_it_keeps_what_it_compiles_in_a_folder_of_this_users(
    tmp_path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "mine"))
    for name in (fa4._SWITCH, *fa4._DSL_FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(fa4._FOLDER, "elsewhere")
    fa4._keep_compiled_code()
    assert os.environ[fa4._SWITCH] == "1"
    assert os.environ[fa4._FOLDER] == "elsewhere"
    for name in fa4._DSL_FOLDERS:
        assert os.stat(os.environ[name]).st_mode & 0o777 == 0o700


def check_call(shapes, mask, depth, **options) -> None:  # type: ignore[no-untyped-def]
    """Both passes against float64."""
    tensors = [torch.randn(2, h, n, 16).to(torch.bfloat16) for h, n in shapes]
    check(tensors, mask, 0.25, (1e-2, 3e-2), depth=depth, **options)


@pytest.mark.parametrize(
    ("depth", "is_causal", "kv_heads"),
    [(0, False, 2), (0, True, 4), (1, False, 4), (2, True, 2)],
)
def test_it_is_exact(stand_in, depth, is_causal, kv_heads) -> None:  # type: ignore[no-untyped-def]
    shapes = ((4, 300), (kv_heads, 300), (kv_heads, 300), (4, 300))
    check_call(shapes, Mask(), depth, given=None, is_causal=is_causal, kernel=stand_in)


@pytest.mark.parametrize(("what", "depth"), [("nan", 0), ("inf", 1)])
def test_a_row_that_is_not_finite_stays_so(stand_in, what, depth) -> None:  # type: ignore[no-untyped-def]
    q, k, v, grad_out = (
        torch.randn(1, 2, 200, 16, dtype=torch.float16) for _ in range(4)
    )
    q[0, 1, 50, 3] = float(what)
    call = {"is_causal": True, "kernel": stand_in, "depth": depth}
    out, lse = qa.attention_with_lse(q, k, v, **call)
    rows = torch.zeros(1, 2, 200, dtype=torch.bool)
    rows[0, 1, 50] = True
    assert torch.equal(out.isnan().any(-1), rows)
    assert torch.equal(~lse.isfinite(), rows)
    grads = qa.attention_backward(grad_out, q, k, v, out, lse, **call)
    assert all(bool(grad[0, 1].isnan().any()) for grad in grads)
    assert all(bool(grad[0, 0].isfinite().all()) for grad in grads)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_backward_is_scaled_if_gradients_of_scores_overflow(
    stand_in, kv_heads, softcap
) -> None:  # type: ignore[no-untyped-def]
    check_overflow_of_scores(stand_in, kv_heads=kv_heads, softcap=softcap)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(40))
def test_windows_and_documents_are_its_own_calls(stand_in, monkeypatch, seed) -> None:  # type: ignore[no-untyped-def]
    """No pair is tested one by one, and each call keeps its pairs: against float64."""
    draw = random.Random(seed)
    n_queries = draw.choice([1, 5, 130, 300])
    n_keys = n_queries if draw.random() < 0.6 else draw.choice([3, 128, 400])
    window = (draw.choice([-1, 0, 3, 60, 500]), draw.choice([-1, 0, 3, 60]))
    documents = None
    if draw.random() < 0.4 and n_queries == n_keys:
        documents = (torch.arange(n_queries) // draw.choice([40, 90, 1000]))[None]
    mask = Mask(
        causal=draw.random() < 0.5, window=window, documents=documents,
        softcap=draw.choice([None, None, 2.0]),
    )  # fmt: skip
    asked: list[object] = []
    monkeypatch.setattr(
        "quorum_attention.kernels.masked.partwise._PartMasks.mask_of",
        lambda *at: asked.append(at),
    )
    shapes = ((4, n_queries), (2, n_keys), (2, n_keys), (4, n_queries))
    check_call(shapes, mask, draw.choice([0, 0, 1]), kernel=stand_in)
    assert not asked


@pytest.mark.parametrize("by_token", [False, True])
def test_its_output_lies_as_the_query_does(stand_in, by_token) -> None:  # type: ignore[no-untyped-def]
    """An output that lies token after token was copied: 2 % of a short call."""
    query, key, value = (torch.randn(2, 4, 24, 16).bfloat16() for _ in range(3))
    if by_token:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    call = Call(query, key, value, True, 0.25)
    out, _ = stand_in.whole_forward(call)
    assert out.stride() == query.stride()


@pytest.mark.slow
def test_its_import_does_not_load_torchs_compiler() -> None:
    """A package that it imports decorates functions by ``torch.compiler.disable``:
    1.3 s of a first call."""
    done = run_python(
        "import sys, torch\n"
        "from quorum_attention.kernels.torch_private import without_loading_compiler\n"
        "disable = torch.compiler.disable\n"
        "with without_loading_compiler():\n"
        "    @torch.compiler.disable\n"
        "    def double(x):\n"
        "        return 2 * x\n"
        "assert torch.compiler.disable is disable\n"
        "assert double(3) == 6\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "x = torch.ones(3)\n"
        "compiled = torch.compile(lambda x: double(x) + 1, backend='eager')\n"
        "assert torch.equal(compiled(x), 2 * x + 1)\n"
        "assert torch._dynamo.utils.counters['graph_break']\n"
    )
    assert done.returncode == 0, done.stderr
