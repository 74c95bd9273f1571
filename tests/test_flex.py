"""FlexAttention's function taken over: the same results, or torch's own function.

More drawn calls: ``python tests/test_flex.py FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.attention import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import quorum_attention as qa

torchs = flex.flex_attention
DOCUMENTS = torch.arange(300) // 37
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)

MASKS: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 20,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "of heads and entries": lambda b, h, q, k: (q + k + h + b) % 3 > 0,
    "nothing for some": lambda b, h, q, k: (q > 40) & (k < 100),
}
SCORES: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "slopes": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
    "cap": lambda score, b, h, q, k: 2 * torch.tanh(score / 2),
}


def draw_tensors(n_queries: int, n_keys: int, kv_heads: int = 4) -> list[torch.Tensor]:
    """query, key, value of two entries, float64."""
    shapes = [
        (2, 4, n_queries, 16),
        (2, kv_heads, n_keys, 16),
        (2, kv_heads, n_keys, 8),
    ]
    return [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]


def results(
    call: Callable[..., Any], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Output and gradients of a call."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = call(*leaves)
    out.sin().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The formula with all scores at once. torch's function has no gradients on
    CPUs."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    scores = reference_scores(query, key, score_mod, mask_mod, scale)
    return scores.softmax(-1).nan_to_num() @ value


def reference_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """All scores, modified and masked."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
    return scores


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(MASKS)),
    st.sampled_from(sorted(SCORES)),
    st.sampled_from([32, 64]),
    st.integers(2, 150),
    st.integers(2, 150),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0.3]),
)
def test_calls_of_every_kind(
    mask: str,
    score: str,
    block: int,
    n_queries: int,
    n_keys: int,
    kv_heads: int,
    scale: float | None,
) -> None:
    """Results are those of the formula, of masks and score modifications, cut by a
    budget."""
    mask_mod = MASKS[mask]
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(
            mask_mod, 2, 4, n_queries, n_keys, "cpu", BLOCK_SIZE=block
        )
    tensors = draw_tensors(n_queries, n_keys, kv_heads)

    def call(*leaves: torch.Tensor) -> Any:
        function = flex.flex_attention
        return function(
            *leaves, SCORES[score], block_mask, scale, enable_gqa=kv_heads < 4
        )

    def exact(*leaves: torch.Tensor) -> torch.Tensor:
        return reference(*leaves, SCORES[score], mask_mod, scale)  # type: ignore[misc]

    expected = results(exact, tensors)
    report = qa.Report()
    with qa.patched_flex_attention(min_tokens=0, depth=1, report=report):
        ours = results(call, tensors)
    assert report.total.forwards == 1
    assert report.total.backwards == 1
    assert_close(ours, expected, 1e-9)


def test_blocks_that_a_mask_lists_and_no_others_are_kept() -> None:
    """A mask from lists of blocks has a ``mask_mod`` that keeps all pairs.
    FlexAttention's kernels go by the lists; its form without a compiler looks at
    ``mask_mod`` alone."""
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    numbers = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, numbers, BLOCK_SIZE=32)
    tensors = draw_tensors(64, 64)

    def call(*leaves: torch.Tensor) -> Any:
        return flex.flex_attention(*leaves, block_mask=block_mask)

    def listed(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= 32) | (k >= 32)

    expected = results(lambda *leaves: reference(*leaves, mask_mod=listed), tensors)
    with qa.patched_flex_attention(min_tokens=0):
        assert_close(results(call, tensors), expected, 1e-9)


def test_log_sums() -> None:
    """They are natural logarithms, as torch's."""
    tensors = [tensor.detach() for tensor in draw_tensors(50, 60)]
    expected = torchs(*tensors, return_lse=True)
    with qa.patched_flex_attention(min_tokens=0):
        ours = flex.flex_attention(*tensors, return_lse=True)
        out, extra = flex.flex_attention(*tensors, return_aux=flex.AuxRequest(lse=True))
    assert_close(list(ours), list(expected), 1e-5)
    assert_close([out, extra.lse], list(expected), 1e-5)


def test_whom_the_patch_reaches() -> None:
    """Modules that imported the function by name are reached, other threads' calls are
    torch's."""
    importer = ModuleType("importer_of_flex_attention")
    importer.flex_attention = torchs  # type: ignore[attr-defined]
    sys.modules[importer.__name__] = importer
    report = qa.Report()
    tensors = [tensor.detach() for tensor in draw_tensors(50, 50)]
    try:
        with qa.patched_flex_attention(min_tokens=10, report=report):
            importer.flex_attention(*tensors)  # type: ignore[attr-defined]
            with qa.patched_flex_attention(enabled=False):
                flex.flex_attention(*tensors)
            flex.flex_attention(*(tensor[:, :, :9] for tensor in tensors))  # too short
        assert importer.flex_attention is torchs  # type: ignore[attr-defined]
    finally:
        del sys.modules[importer.__name__]
    assert flex.flex_attention is torchs
    assert report.total.forwards == 1


def test_heads_are_not_broadcast_where_torch_refuses_them() -> None:
    """One head of keys was taken for all heads of queries, without ``enable_gqa``."""
    query, key, value = [tensor.detach() for tensor in draw_tensors(50, 50)]
    key = key[:, :1]
    value = value[:, :1]
    with pytest.raises(ValueError) as torchs_error:
        torchs(query, key, value)
    with (
        qa.patched_flex_attention(min_tokens=10),
        pytest.raises(ValueError) as error,
    ):
        flex.flex_attention(query, key, value)
    assert str(error.value) == str(torchs_error.value)


def test_a_call_of_two_dtypes_is_torchs() -> None:
    """torch computes it, and an error was raised inside of the block."""
    query, key, value = [tensor.detach() for tensor in draw_tensors(50, 50)]
    expected = torchs(query, key, value.float())
    with qa.patched_flex_attention(min_tokens=10):
        out = flex.flex_attention(query, key, value.float())
    assert torch.equal(out, expected)


def test_both_functions_in_one_block() -> None:
    """``patched_sdpa(flex=True)``, and ``patch_sdpa``, take over both; without ``flex``
    one."""
    tensors = [tensor.detach() for tensor in draw_tensors(50, 50)]
    report = qa.Report()

    def call_both() -> int:
        before = report.total.forwards
        flex.flex_attention(*tensors)
        torch.nn.functional.scaled_dot_product_attention(*tensors)
        return report.total.forwards - before

    with qa.patched_sdpa(min_tokens=10, report=report):
        assert call_both() == 1
    with qa.patched_sdpa(min_tokens=10, flex=True, report=report):
        assert call_both() == 2
        with qa.patched_sdpa(enabled=False, flex=True):
            assert call_both() == 0
    qa.patch_sdpa(min_tokens=10, flex=True, report=report)
    assert call_both() == 2
    qa.unpatch_sdpa()
    assert call_both() == 0
    assert flex.flex_attention is torchs


GLOBAL_SCALES = torch.randn(4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "nothing for some"])
@pytest.mark.parametrize("trains_inputs", [True, False])
def test_learned_tables_get_their_gradients(
    kv_heads: int, mask: str, trains_inputs: bool
) -> None:
    """Tables of one dimension and two, made by other operators or read by a name of the
    module, get the formula's gradients, those of the lse among them."""
    weights = torch.randn(4, 300, dtype=torch.float64, requires_grad=True)
    tensors = draw_tensors(150, 140, kv_heads)
    mask_mod = MASKS[mask]
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, 2, 4, 150, 140, "cpu", BLOCK_SIZE=32)

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        table = weights * 2

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score * (1 + GLOBAL_SCALES[h] / 8) + table[h, q - k + 150]

        leaves = [t.detach().clone().requires_grad_(trains_inputs) for t in tensors]
        out, lse = call(*leaves, score_mod)
        loss = out.sin().sum() + lse.clamp(min=-50.0).cos().sum()
        learned = [weights, GLOBAL_SCALES, *(leaves if trains_inputs else ())]
        return [out.detach(), *torch.autograd.grad(loss, learned)]

    def exact(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = reference_scores(query, key, score_mod, mask_mod)
        out = reference(query, key, value, score_mod, mask_mod)
        return out, scores.logsumexp(-1)

    def ours(*arguments: Any) -> Any:
        call: Any = flex.flex_attention
        return call(*arguments, block_mask, enable_gqa=kv_heads < 4, return_lse=True)

    expected = gradients(exact)
    with qa.patched_flex_attention(min_tokens=0, depth=1):
        assert_close(gradients(ours), expected, 1e-9)


def test_a_learned_table_and_its_caller() -> None:
    """A table that no score depends on gets a gradient of 0. Without gradients the call
    is as any other."""
    table = torch.zeros(100, requires_grad=True)
    unused = torch.zeros(100, requires_grad=True)
    tensors = [tensor.detach().float() for tensor in draw_tensors(50, 50)]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        assert unused is not None
        return score + table[q - k + 50]

    with qa.patched_flex_attention(min_tokens=0):
        out: Any = flex.flex_attention(*tensors, score_mod)
        out.sum().backward()
        with torch.no_grad():
            assert not flex.flex_attention(*tensors, score_mod).requires_grad  # type: ignore[union-attr]
    assert table.grad is not None
    assert unused.grad is not None
    assert not unused.grad.any()


def test_a_table_that_cannot_be_found_is_refused() -> None:
    """It would get no gradient without a word."""
    model = torch.nn.Module()
    model.table = torch.nn.Parameter(torch.zeros(100, dtype=torch.float64))
    name = "tab" + "le"
    tensors = draw_tensors(50, 50)
    with (
        qa.patched_flex_attention(min_tokens=0),
        pytest.raises(NotImplementedError, match="gradient"),
    ):
        flex.flex_attention(
            *tensors, lambda score, b, h, q, k: score + getattr(model, name)[q - k + 50]
        )


class DrawnCall:
    """A call of a random kind, by its number.

    Attributes:
        compiled: whether the function is compiled first: every eighth.
    """

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.mask_mod = MASKS[draw.choice(sorted(MASKS))]
        self.score = draw.choice([*sorted(SCORES), "learned"])
        self.block = draw.choice([32, 64, (32, 64), (128, 32)])
        self.n_queries = draw.randint(2, 150)
        self.n_keys = draw.randint(2, 150)
        self.kv_heads = draw.choice([1, 2, 4])
        self.scale = draw.choice([None, 0.3])
        self.depth = draw.choice([0, 1])
        self.compiled = number % 8 == 0
        torch.manual_seed(number)
        self.tensors = draw_tensors(self.n_queries, self.n_keys, self.kv_heads)
        if self.score == "learned":
            self.tensors.append(torch.randn(4, 300, dtype=torch.float64))

    def score_mod(self, leaves: tuple[torch.Tensor, ...]) -> Any:
        """The score modification, of a table among ``leaves`` if it is learned."""
        if self.score != "learned":
            return SCORES[self.score]
        table = leaves[3]

        def modify(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score + table[h, q - k + 150]

        return modify

    def exact(self, *leaves: torch.Tensor) -> torch.Tensor:
        score_mod = self.score_mod(leaves)
        return reference(*leaves[:3], score_mod, self.mask_mod, self.scale)

    def ours(self, *leaves: torch.Tensor) -> Any:
        function: Any = flex.flex_attention
        if self.compiled:
            torch.compiler.reset()
            function = torch.compile(function, backend="aot_eager")
        block_mask = None
        if self.mask_mod is not None:
            lengths = (self.n_queries, self.n_keys)
            block_mask = create_block_mask(
                self.mask_mod, 2, 4, *lengths, "cpu", BLOCK_SIZE=self.block
            )
        score_mod = self.score_mod(leaves)
        is_grouped = self.kv_heads < 4
        return function(
            *leaves[:3], score_mod, block_mask, self.scale, enable_gqa=is_grouped
        )


def check_drawn(numbers: range) -> None:
    """Check that each call is computed by us, with the formula's results and
    gradients."""
    for number in numbers:
        call = DrawnCall(number)
        report = qa.Report()
        with qa.patched_flex_attention(min_tokens=0, depth=call.depth, report=report):
            ours = results(call.ours, call.tensors)
        assert report.total.forwards == 1, vars(call)
        try:
            assert_close(ours, results(call.exact, call.tensors), 1e-9)
        except AssertionError as error:
            raise AssertionError(f"{number}: {vars(call)}") from error


@pytest.mark.slow
def test_drawn_calls() -> None:
    """Of all kinds, learned tables among them; every eighth is compiled."""
    check_drawn(range(96))


@pytest.mark.slow
def test_a_compiled_call() -> None:
    """``torch.compile`` inside the block calls it outside the graph."""
    tensors = draw_tensors(90, 90)
    block_mask = create_block_mask(MASKS["causal"], 1, 1, 90, 90, "cpu", BLOCK_SIZE=32)
    expected = results(
        lambda *leaves: reference(*leaves, mask_mod=MASKS["causal"]), tensors
    )
    report = qa.Report()
    with qa.patched_flex_attention(min_tokens=0, report=report):
        compiled = torch.compile(flex.flex_attention, backend="aot_eager")
        ours = results(
            lambda *leaves: compiled(*leaves, block_mask=block_mask), tensors
        )
    assert report.total.forwards == 1
    assert_close(ours, expected, 1e-9)


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    check_drawn(range(first, first + count))
