"""``Mask``: what it is read as, how long that is remembered, and what it refuses. That
calls under it are right: tests/test_conformance.py."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from helpers.attention import assert_close, inputs
from helpers.masks import check, dense, exact
from helpers.passes import both_passes, pass_of
from helpers.plans import shape_of
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels.kit import document, sliding_window
from quorum_attention.kernels.masked.resolve import resolve


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dropout_under_a_mask_on_a_gpu_is_planned_for_the_native_kernel(
    softcap: float | None,
) -> None:
    sizes: dict[str, Any] = {"device": "cuda", "dropout_p": 0.1, "budget": "1GiB"}
    for mask in (
        Mask(window=(99, 0)),
        Mask(causal="lower_right", documents=torch.arange(500)),
    ):
        plan = qa.plan(500, attn_mask=replace(mask, softcap=softcap), **sizes)
        assert plan.kernel == "native"


def test_the_backward_without_autograd_gives_the_same_gradients() -> None:
    given = inputs(40)
    mask = Mask(causal=True, window=(9, 0), sinks=torch.randn(2))
    run = pass_of(given, True, attn_mask=mask)
    want = exact(*given.three, given.grad_out, mask, 8**-0.5)
    assert_close(run(grad_sinks=True), want.grads, 1e-5)
    with pytest.raises(ValueError, match="grad_sinks needs a Mask with sinks"):
        run(attn_mask=None, grad_sinks=True)


def test_a_mask_that_masks_nothing_more_is_the_call_without_one() -> None:
    """Then every route and every kernel of plain calls is there."""
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    plain, causal = qa.Report(), qa.Report()
    same = Mask(
        causal="lower_right", window=1000, documents=torch.zeros(300, dtype=torch.int64),
        key_padding=torch.ones(1, 300, dtype=torch.bool),
    )  # fmt: skip
    found = qa.attention(q, k, v, attn_mask=same, depth=1, report=causal)
    wanted = qa.attention(q, k, v, is_causal=True, depth=1, report=plain)
    assert torch.equal(found, wanted)
    assert causal.forward.left_out == plain.forward.left_out
    assert causal.forward.levels == plain.forward.levels


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda ids: ids[10:].fill_(1),
    # torch does not count these.
    "by NumPy": lambda ids: ids.numpy()[10:].fill(1),
    "by data": lambda ids: ids.data[10:].fill_(1),
    "other data": lambda ids: setattr(ids, "data", torch.arange(20) // 10),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("again", [True, False], ids=["the same mask", "another mask"])
def test_a_tensor_that_changes_is_read_again(change: str, again: bool) -> None:
    """Ids in memory that NumPy fills, for one: torch knows of nothing that is written
    there."""
    q, k, v = (torch.randn(1, 1, 20, 4) for _ in range(3))
    ids = torch.zeros(20, dtype=torch.int64)
    mask = Mask(documents=ids)
    before, version = qa.attention(q, k, v, attn_mask=mask), ids._version
    CHANGES[change](ids)
    assert (ids._version == version) == (change != "in place")
    mask = mask if again else Mask(documents=ids)
    for _ in range(2):  # the second time it is remembered
        after = qa.attention(q, k, v, attn_mask=mask)
        want = torchs(q, k, v, dense(mask, 1, 1, 20, 20))
        assert not torch.allclose(before, after)
        assert torch.allclose(after, want, atol=1e-5)


def test_a_mask_is_read_once_for_all_masks_of_the_same_tensors() -> None:
    ids = torch.arange(40) // 7
    call = shape_of((1,), 1, 1, 40, 40)
    one = resolve(Mask(documents=ids), call)
    assert resolve(Mask(documents=ids), call) is one
    ids += 1
    other = resolve(Mask(documents=ids), call)
    assert other is not one
    assert resolve(Mask(documents=ids), call) is other
    assert resolve(Mask(documents=ids.clone()), call) is not other


def test_masks_are_combined() -> None:
    window, causal, lower = (
        Mask(window=5),
        Mask(causal=True),
        Mask(causal="lower_right"),
    )
    right, documents = Mask(window=(-1, 2)), Mask(documents=torch.arange(30) // 9)

    def kept(mask: Mask, n: int = 30) -> torch.Tensor:
        return dense(mask, 1, 1, n, 30)

    assert torch.equal(kept(window | causal), kept(window) | kept(causal))
    every = kept(window) & kept(right) & kept(documents)
    assert torch.equal(kept(window & right & documents), every)
    # The window's own offset is 0, beside a causal mask that has another.
    assert torch.equal(kept(lower & window, 10), kept(lower, 10) & kept(window, 10))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"causal": "left"}, "Mask.causal must be"),
        ({"causal": 1}, "Mask.causal must be"),
        ({"offset": 1.5}, "Mask.offset must be a whole number"),
        ({"window": (1, 2, 3)}, "Mask.window must be"),
        ({"window": -2}, "Mask.window must be"),
        ({"chunk": 0}, "Mask.chunk must be at least 1"),
        ({"chunk": 10**30}, "Mask.chunk must be at most"),
        ({"documents": torch.zeros(3)}, "Mask.documents must be integers"),
        ({"documents": (torch.zeros(3, dtype=torch.int64),)}, "one tensor or two"),
        ({"key_padding": torch.zeros(3)}, "Mask.key_padding must be bool"),
        ({"key_lengths": 3}, "Mask.key_lengths must be a tensor"),
        ({"keeps": 3}, "Mask.keeps must be callable"),
        ({"either": Mask()}, "Mask.either must be a tuple of masks"),
        ({"every": (Mask(softcap=1.0),)}, "its masks have no softcap"),
        ({"softcap": 0.0}, "Mask.softcap must be above 0"),
        ({"sinks": torch.zeros(2, 2)}, "Mask.sinks must have 1 dimensions"),
    ],
)
def test_fields_that_make_no_sense_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Mask(**fields)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            Mask(documents=torch.zeros(7, dtype=torch.int64)),
            "Mask.documents must have shape",
        ),
        (
            Mask(key_padding=torch.ones(3, 8, dtype=torch.bool)),
            "Mask.key_padding must have shape",
        ),
        (
            Mask(key_lengths=torch.tensor([9, 2])),
            "Mask.key_lengths must be from 0 to the 8 keys",
        ),
        (Mask(key_lengths=torch.tensor([1])), "Mask.key_lengths must have shape"),
        (
            Mask(sinks=torch.zeros(3)),
            "Mask.sinks must be one for each of the 2 query heads",
        ),
        (Mask(bias=torch.zeros(8, 7)), "attn_mask must broadcast"),
    ],
)
def test_masks_that_do_not_fit_the_call_are_refused(mask: Mask, words: str) -> None:
    q, k, v = (torch.randn(2, 2, 8, 4) for _ in range(3))
    with pytest.raises((TypeError, ValueError), match=words):
        qa.attention(q, k, v, attn_mask=mask)


NONE = torch.zeros(0, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(key_lengths=NONE[:, 0]), Mask(key_padding=NONE > 0, causal=True),
        Mask(documents=NONE, window=2) | Mask(documents=(NONE, NONE)),
        Mask(chunk=3, key_lengths=NONE[:, 0], keeps=lambda b, h, q, k: k <= q) & Mask(window=1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [0, "auto"])
def test_a_batch_without_entries(mask: Mask, depth: int | str) -> None:
    """Tensors of a mask that are of each entry have no rows either."""
    given = inputs(8, batch=(0,))
    results = both_passes(given, attn_mask=mask, depth=depth)
    assert [t.shape for t in results] == [
        t.shape for t in (given.query, given.query[..., 0], *given.three)
    ]


class Unhashable:
    """A rule that compares by what it holds, as a dataclass does."""

    __hash__ = None

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return torch.as_tensor(q - k < 9)


@pytest.mark.parametrize(
    "keeps", [Unhashable(), sliding_window(9, 40) | document(torch.arange(50) // 8)]
)
def test_any_callable_is_a_rule(keeps: Any) -> None:
    check(
        [torch.randn(2, 2, 50, 8) for _ in range(4)],
        Mask(keeps=keeps, causal=True),
        0.4,
        (2e-5, 1e-4),
    )


def test_a_mask_lets_go_of_its_functions_and_tensors() -> None:
    """What a mask was read as is remembered, but not beyond it."""
    q, k, v = (torch.randn(1, 1, 20, 4) for _ in range(3))

    table = torch.ones(20, dtype=torch.bool)
    mask = Mask(
        keeps=lambda b, h, q, k, table=table: table[k],
        key_padding=torch.rand(1, 20) < 0.5,
    )
    held = [ref(table), ref(mask.keeps), ref(mask.key_padding)]
    for _ in range(2):
        qa.attention(q, k, v, attn_mask=mask)
    del mask, table
    gc.collect()
    assert [one() for one in held] == [None, None, None]


# --- torch's own causal masks: tensors that nobody wrote, so they have to be recognised ---------

LENGTHS = [(20, 50), (50, 20), (1, 7)]
MAKES = [causal_lower_right, causal_upper_left]


def made(make, n_queries: int, n_keys: int) -> CausalBias:  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lower right with more queries than keys
        bias: CausalBias = make(n_queries, n_keys)
    bias.fill_(7.0)
    return bias


def tensors(n_queries: int, n_keys: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, n, 16) for n in (n_queries, n_keys, n_keys)]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_calls_take_them_for_what_they_say(make, lengths) -> None:
    query, key, value = tensors(*lengths)
    bias = made(make, *lengths)
    kept = torch.ones(lengths, dtype=torch.bool)
    kept = kept.tril(lengths[1] - lengths[0] if make is causal_lower_right else 0)
    exact = torchs(query.double(), key.double(), value.double(), kept)
    exact[:, :, ~kept.any(-1)] = 0
    for more in ({}, {"depth": 1}):
        out, lse = qa.attention_with_lse(query, key, value, bias, **more)
        torch.testing.assert_close(out, exact.float())
        torch.testing.assert_close(qa.attention(query, key, value, bias, **more), out)
        grads = qa.attention_backward(out, query, key, value, out, lse, bias, **more)
        plain = qa.attention_backward(out, query, key, value, out, lse, kept, **more)
        torch.testing.assert_close(grads, plain)


@pytest.mark.parametrize("min_tokens", [1, 10_000])
@pytest.mark.parametrize("make", MAKES)
def test_a_patched_function_takes_them_as_torchs_own_does(
    make, min_tokens: int
) -> None:
    """Torch's own recognises them by the function's name, which is ours while it is
    patched."""
    query, key, value = tensors(20, 50)
    bias = made(make, 20, 50)
    expected = torchs(query, key, value, bias)
    for enabled in (True, False):
        with qa.patched_sdpa(min_tokens=min_tokens, enabled=enabled):
            patched = torch.nn.functional.scaled_dot_product_attention
            torch.testing.assert_close(patched(query, key, value, bias), expected)
            torch.testing.assert_close(
                patched(query, key, value, attn_mask=bias), expected
            )
            with pytest.raises(
                ValueError, match="CausalBias should not be used with causal"
            ):
                patched(query, key, value, bias, 0.0, True)


def test_in_compiled_code_of_other_lengths_and_within_a_mask() -> None:
    three = tensors(20, 50)
    bias = made(causal_lower_right, 20, 50)
    compiled = torch.compile(lambda *three: qa.attention(*three, bias), backend="eager")
    torch.testing.assert_close(compiled(*three), torchs(*three, bias))
    with pytest.raises(
        ValueError, match=r"\(20, 50\) tokens, got a CausalBias of \(19, 50\)"
    ):
        qa.attention(*three, made(causal_lower_right, 19, 50))
    with pytest.raises(
        NotImplementedError, match="attn_mask must be a plain tensor, got a Causal"
    ):
        qa.attention(*three, qa.Mask(bias=bias))


def test_a_function_without_bools_beside_other_conditions() -> None:
    """The error names the function: torch's own was of its operator ``&``."""
    query = torch.randn(1, 2, 40, 8, requires_grad=True)
    documents = torch.arange(40) // 5
    mask = Mask(documents=documents, keeps=lambda b, h, q, k: (q - k).float())
    with pytest.raises(TypeError, match=r"must return a tensor of torch\.bool"):
        qa.attention(query, query, query, mask)
