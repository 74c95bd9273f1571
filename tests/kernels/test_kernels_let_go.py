"""What is remembered about a kernel does not keep it: users make their own, and drop
them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers.attention import attention, inputs

import quorum_attention as qa
from quorum_attention.kernels import CpuKernel, DenseKernel, InnerKernel
from quorum_attention.kernels.kit.masks import document

pytestmark = pytest.mark.usefixtures("one_thread")


class Rectangles(CpuKernel):
    name = "rectangles"


class Untried(CpuKernel):
    """With its own attention: no trial remembers it, but small calls might."""

    name = "untried"
    own_attention = True


KERNELS: dict[str, Callable[[], InnerKernel]] = {
    "function": lambda: qa.from_lse_function(attention),
    "rectangles": Rectangles,
    "untried": Untried,
    "documents": lambda: qa.from_score_mod(
        mask_mod=document(torch.arange(150) // 40), compiled=False
    ),
    "longnet": lambda: qa.LongNetKernel([(30, 1), (60, 2)]),
}


def use(kernel: InnerKernel) -> weakref.ref[torch.Tensor]:
    """All that remembers something: calls of every route, plans, an estimate, a check.
    An input of small calls."""
    made = inputs(150)
    for call in ({}, {"depth": 2}, {"budget": "256MiB"}):
        leaves = [t.clone().requires_grad_() for t in made.three]
        qa.attention(*leaves, is_causal=True, kernel=kernel, **call).sum().backward()
    slots = [t.mT.contiguous().mT.requires_grad_() for t in made.three]
    qa.attention(*slots, kernel=kernel, depth=1, is_causal=True).sum().backward()
    for backward in (False, True):
        qa.plan(
            150,
            heads=2,
            head_dim=8,
            dtype=torch.float32,
            kernel=kernel,
            backward=backward,
        )
    qa.estimate(150, heads=2, head_dim=8, dtype=torch.float32, kernel=kernel)
    qa.check_kernel(kernel, n_tokens=60, levels=[(3,)])
    for n in range(1, 50):
        qa.attention(made.query[:, :, :n], made.key, made.value, kernel=kernel)
    return weakref.ref(made.query)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", list(KERNELS))
def test_a_kernel_that_nobody_holds_is_gone(kind: str) -> None:
    kernel = KERNELS[kind]()
    watch = [use(kernel), weakref.ref(kernel)]
    del kernel
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


def test_what_a_mask_reads_goes_with_the_mask() -> None:
    """At once: it may be memory of a GPU, for which no garbage is collected."""
    made, ids = inputs(150), torch.arange(150) // 40
    watch = weakref.ref(ids)
    gc.collect()
    gc.disable()
    try:
        mask = qa.Mask(keeps=lambda b, h, q, k, ids=ids: ids[q] == ids[k])
        qa.attention(*made.three, mask)
        del mask, ids
        assert watch() is None
    finally:
        gc.enable()


def test_a_kernel_of_another_one_s_address_is_tried_anew() -> None:
    """Answers go with the kernel: the next one in the same place is another."""

    class Sometimes(DenseKernel):
        name = "sometimes"

        def __init__(self, broken: bool) -> None:
            self.broken = broken

        def forward(self, task, state):  # type: ignore[no-untyped-def]
            if self.broken:
                raise RuntimeError("it cannot")
            super().forward(task, state)

    q = inputs(60).query
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="it cannot"):
            qa.attention(q, q, q, kernel=Sometimes(True))
        qa.attention(q, q, q, kernel=Sometimes(False))
