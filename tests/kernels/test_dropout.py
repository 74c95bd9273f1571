"""Which pairs are dropped: the published generator, by position alone, and random by
every test."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.memory import usage

from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.dropout import (
    LARGEST_SEED,
    Dropout,
    dropped,
    dropped_bytes,
    philox,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0,) * 4, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xA4093822 | 0x299F31D0 << 32,
         (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_the_published_words(counter, seed, words) -> None:
    """The known answers of Random123, by the authors of Philox (philox4x32, 7
    rounds)."""
    found = philox(tuple(torch.tensor([word]) for word in counter), seed)
    assert tuple(int(word) for word in found) == words


def scalar(dropout: Dropout, b: int, h: int, i: int, j: int) -> bool:
    """The definition in Python's integers, one pair at a time."""
    counter = [j // 4, i, h + dropout.first_head, b + dropout.first_entry]
    key = [dropout.seed % 2**32, dropout.seed // 2**32]
    for _ in range(7):
        one, two = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            two // 2**32 ^ counter[1] ^ key[0], two % 2**32,
            one // 2**32 ^ counter[3] ^ key[1], one % 2**32,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[j % 4] < min(2**32 - 1, round(dropout.p * 2**32))


def test_every_pair_is_as_defined_wherever_its_run_begins() -> None:
    """Runs at any offset from a multiple of four, positions up to a billion and
    beyond."""
    for _ in range(40):
        one = Dropout(
            random.random(), random.randrange(LARGEST_SEED + 1), random.randrange(100),
            random.randrange(100),
        )  # fmt: skip
        queries = torch.randint(0, 2**32, (3,))
        runs, local = [], random.randrange(50)
        at = random.choice([0, 10**9, 2**31 - 3])
        for _ in range(random.randint(1, 3)):
            at += random.randrange(9)
            length = random.randrange(12)
            runs.append(Rows(at, at + length, local))
            at, local = at + length, local + length
        found = dropped(one, 2, 2, queries, runs)
        keys = [j for run in runs for j in range(run.start, run.stop)]
        assert found.shape == (2, 2, 3, len(keys))
        for b, h, i, j in torch.cartesian_prod(
            *map(torch.arange, found.shape)
        ).tolist():
            assert bool(found[b, h, i, j]) == scalar(
                one, b, h, int(queries[i]), keys[j]
            )


def test_parts_are_parts_of_the_whole() -> None:
    one = Dropout(0.4, 12345)
    whole = dropped(one, 3, 4, torch.arange(50), [Rows(0, 70, 0)])
    part = dropped(one.at(2, 1), 2, 2, torch.arange(7, 31), [Rows(5, 66, 0)])
    assert torch.equal(part, whole[1:, 2:, 7:31, 5:66])


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 3, 500, 700), (1, 1, 4000, 3), (1, 2, 3, 9000)]
)
def test_memory_is_bounded(sizes: tuple[int, int, int, int]) -> None:
    queries, keys = torch.arange(sizes[2]), [Rows(2, sizes[3] + 2, 0)]
    found = usage(lambda: dropped(Dropout(0.5, 3), *sizes[:2], queries, keys))
    assert found.peak <= dropped_bytes(*sizes)
