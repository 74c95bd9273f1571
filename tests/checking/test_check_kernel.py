"""``check_kernel`` finds every planted error, and says where; right kernels are
exact."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from helpers.planted_errors import (
    FUNCTIONS,
    RIGHT,
    SIXTEEN_BITS,
    ReusesItsBuffer,
    WholeTask,
    gradients,
    plain,
    planted,
)

import quorum_attention as qa
from quorum_attention.kernels.kit import from_lse_function

pytestmark = pytest.mark.usefixtures("one_thread")
WRONG = planted()
SMALL = {"device": "cpu", "n_tokens": 67, "levels": ((3,),)}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", WRONG)
def test_a_planted_error_is_found_and_located(name: str) -> None:
    """A law is broken, or a cut differs: then the result, its error and its first rows
    are said."""
    wider = "group" in name  # what only calls of fewer key heads show
    heads = 4 if wider else 2
    found = qa.check_kernel(
        WRONG[name](), other_sizes=wider, heads=heads, seed=1, **SMALL
    )
    assert not found.exact
    wrong = [case for case in found.cases if case.verdict == "not exact"]
    assert wrong or found.broken
    for case in wrong:
        assert case.largest_error > case.limit
        assert case.rows
        assert {result for result, *_ in case.rows} <= set(case.errors)
    for sentence in found.broken:
        assert sentence in str(found)
        assert sentence in found.to_dict()["broken"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("no_scale", "the scale is ignored"),
     ("noise", "two calls with the same inputs differ"),
     ("reads as if contiguous", "of views of larger tensors"),
     ("backward: halved", "grad_query is off by 5.0e-01"),
     ("backward: noisy", "two calls with the same inputs differ in grad_")],
)  # fmt: skip
def test_what_no_cut_shows_is_said_in_words(name: str, words: str) -> None:
    """Each of these is the same in every cut, or differs for another reason than the
    cut."""
    found = qa.check_kernel(WRONG[name](), other_sizes=False, heads=2, seed=1, **SMALL)
    assert any(words in sentence for sentence in found.broken), str(found)


def drawn(name: str) -> dict[str, Any]:
    """Sizes of inputs, numbers of heads and tokens, and cuts."""
    seed = sum(map(ord, name)) % 83
    return {
        "seed": seed, "n_tokens": 49 + seed % 41, "device": "cpu", "heads": (4, 2, 3)[seed % 3],
        "scale_of_inputs": (1.0, 0.3, 2.0, 1.0)[seed % 4],
        "levels": (((3,),), ((7,),), ((3, 3),))[seed % 3],
    }  # fmt: skip


HALF, SHORT = torch.float16, torch.bfloat16


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in RIGHT),
     *((name, (HALF, SHORT)[i % 2]) for i, name in enumerate(SIXTEEN_BITS))],
)  # fmt: skip
def test_a_right_kernel_is_exact(name: str, dtype: torch.dtype) -> None:
    found = qa.check_kernel(RIGHT[name](), dtype=dtype, **drawn(name))
    assert found.exact, str(found)
    assert not found.broken
    assert all("Error" not in reason for reason in found.skipped), found.skipped


@pytest.mark.slow
def test_kernels_that_take_nothing_wider() -> None:
    found = qa.check_kernel(WholeTask(dtype=HALF), dtype=HALF, **drawn("half"))
    assert found.exact, str(found)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "dtype", "other_sizes"),
    [
        ("noise", HALF, False),
        ("noise", torch.float64, False),
        # It shows in some sizes alone.
        ("lse_rounded_to_fp16", SHORT, True),
    ],
)
def test_an_error_is_found_in_other_dtypes(
    name: str, dtype: torch.dtype, other_sizes: bool
) -> None:
    """Limits come from the dtype: noise must not widen its own."""
    kernel = from_lse_function(FUNCTIONS[name])
    result = qa.check_kernel(
        kernel, dtype=dtype, seed=2, other_sizes=other_sizes, **SMALL
    )
    assert not result.exact, str(result)


def test_a_law_is_tried_in_the_dtype_that_is_asked_for() -> None:
    """A buffer that is used again in fp16 is no fault of fp32."""
    found = qa.check_kernel(
        ReusesItsBuffer(), dtype=HALF, heads=2, other_sizes=False, **SMALL
    )
    assert any(
        "out changes in a later call" in sentence for sentence in found.broken
    ), str(found)
    found = qa.check_kernel(ReusesItsBuffer(), heads=2, other_sizes=False, **SMALL)
    assert found.exact, str(found)


@pytest.mark.slow
def test_heads_and_entries_are_cut() -> None:
    kernel = from_lse_function(FUNCTIONS["local_slopes"])
    found = qa.check_kernel(kernel, is_causal=True, **SMALL)
    (alone,) = (c for c in found.cases if not c.levels and not c.sizes)
    assert alone.heads_per_group == 1
    assert alone.verdict == "not exact"
    together = [
        c for c in found.cases if c.levels and c.heads_per_group is None and not c.sizes
    ]
    assert together
    assert all(c.verdict != "not exact" for c in together)
    assert "heads 1 at a time" in str(found)


@pytest.mark.slow
def test_a_whole_check_takes_seconds() -> None:
    began = time.process_time()
    found = qa.check_kernel(from_lse_function(plain, backward=gradients), device="cpu")
    assert time.process_time() - began < 10
    assert found.exact
    asked = [c for c in found.cases if not c.sizes]
    assert len(asked) == 2 * (6 * 2 + 1)
    assert {c.levels for c in asked} == {
        (),
        (3,),
        (7,),
        (13,),
        (3, 3),
        (7, 3),
        (3, 3, 3),
    }
    assert {c.sizes for c in found.cases if c.sizes} == {
        "220 queries, 331 keys", "331 queries, 220 keys", "4 heads over 2", "values of 24"
    }  # fmt: skip
    assert found.to_dict()["verdict"] == found.verdict


@pytest.mark.slow
def test_what_a_kernel_refuses_is_no_error_of_its_own() -> None:
    """No more is said than that it was not tried."""

    def narrow(query, key, value, *, is_causal, scale):
        if value.shape[-1] != query.shape[-1]:
            raise NotImplementedError("one width")
        return plain(query, key, value, is_causal=is_causal, scale=scale)

    found = qa.check_kernel(from_lse_function(narrow), **SMALL)
    assert found.exact
    assert any("one width" in reason for reason in found.skipped)


def test_a_check_says_how_far_it_is() -> None:
    """From the first call to the last; a check of one kind of call, without other
    sizes, too."""
    told: list[tuple[int, int, str]] = []
    for more in ({}, {"is_causal": True, "other_sizes": False}):
        told.clear()
        found = qa.check_kernel(
            "dense", n_tokens=30, heads=2, batch=1, backward=False, device="cpu",
            levels=[(3,), (3, 3)], progress=lambda *step: told.append(step), **more,
        )  # fmt: skip
        assert found.exact
        assert [done for done, _, _ in told] == list(range(1, len(found.cases) + 1))
        assert {total for _, total, _ in told} == {len(found.cases)}
        assert {label for _, _, label in told} == {"checking dense"}
    with pytest.raises(TypeError, match="progress must be True or False"):
        qa.check_kernel("dense", progress="yes")  # type: ignore[arg-type]


def test_heads_run_one_by_one_with_one_cut_of_the_tokens() -> None:
    """It takes most of a check's calls, as many times more as there are heads and
    entries."""
    found = qa.check_kernel(
        "dense", n_tokens=60, backward=False, device="cpu", other_sizes=False,
        levels=[(3, 3), (7,), (3,)],
    )  # fmt: skip
    alone = {(case.levels, case.layout) for case in found.cases if case.heads_per_group}
    assert alone == {((), "aligned"), ((7,), "balanced")}
