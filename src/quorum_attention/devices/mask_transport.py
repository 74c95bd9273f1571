"""Masks as they are sent to workers: functions by their names, which a worker imports.

A global that a function reads may have another value in a worker, so some of the
function's answers are sent along and compared. A difference that touches none of them
is not seen.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.mask_fields import masks_in
from quorum_attention.kernels.masked.pair_functions import boolean, indexing
from quorum_attention.mask import Keeps, Mask

# Pairs for which a function's answer is compared.
_SAMPLED_PAIRS = 512


class _Samples(NamedTuple):
    """The pairs for which a function's answers are compared.

    Attributes:
        sizes: batch entries, heads, queries and keys of the call.
        seed: of the random numbers that choose the pairs.
        device_type: where the function answers.
    """

    sizes: tuple[int, int, int, int]
    seed: int
    device_type: str

    def pairs(self) -> Sequence[torch.Tensor]:
        """Return batch entries, heads, queries and keys, each (n_pairs,).

        Half of the pairs are anywhere, half at every order of magnitude of the
        distance.
        """
        n_keys = self.sizes[3]
        half = _SAMPLED_PAIRS // 2
        with torch.device("cpu"):  # no generator of the caller's moves on
            generator = torch.Generator().manual_seed(self.seed)
            positions = [
                torch.randint(size, (_SAMPLED_PAIRS,), generator=generator)
                for size in self.sizes
            ]
            exponent = torch.rand(half, generator=generator)
            below_one = torch.rand(half, generator=generator)
            sign = torch.randint(2, (half,), generator=generator) * 2 - 1
        distance = sign * (n_keys**exponent - below_one)
        _, _, query, key = positions
        near = query[::2] + distance.long()
        key[::2] = near.clamp(0, n_keys - 1)
        return [position.to(self.device_type) for position in positions]

    def answers(self, keeps: Keeps) -> list[bool]:
        """Return which of the pairs a function keeps."""
        if 0 in self.sizes:
            return []
        are_kept: list[bool] = torch.vmap(indexing(boolean(keeps)))(
            *self.pairs()
        ).tolist()
        return are_kept


def pickle_mask(mask: Mask, shape: CallShape, device_type: str) -> bytes:
    """Return a mask without bias and sinks as it is sent to workers.

    Args:
        shape: the sizes of the call.
        device_type: where answers are computed.

    Raises:
        NotImplementedError: a function cannot be sent.
    """
    sizes = (shape.batch, shape.heads, shape.n_queries, shape.n_keys)
    samples = _Samples(sizes, random.SystemRandom().getrandbits(63), device_type)
    answers = [samples.answers(keeps) for keeps in _functions_of(mask)]
    try:
        return pickle.dumps((mask, samples, answers))
    except Exception as error:
        raise NotImplementedError(
            "Mask.keeps must be sent to other processes where several devices "
            "compute: use a function of a module, not one made inside another "
            f"function ({error})"
        ) from None


def unpickle_mask(data: bytes) -> Mask:
    """Return the mask, in a worker.

    Raises:
        NotImplementedError: a function cannot be imported here.
        RuntimeError: a function keeps other pairs than in the process that made the
            call.
    """
    try:
        mask, samples, answers = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            "Mask.keeps must be a function that other processes can import where "
            f"several devices compute: put it into a module ({error})"
        ) from error
    for keeps, expected in zip(_functions_of(mask), answers, strict=True):
        if samples.answers(keeps) != expected:
            raise RuntimeError(
                f"the mask function {shown(keeps)} keeps other pairs in a worker than "
                "in the process that made the call: a worker imports it by its name, "
                "and what it reads differs there. Give values as defaults (def "
                "near(b, h, q, k, n=n): ...)"
            )
    return cast(Mask, mask)


def _functions_of(mask: Mask) -> list[Keeps]:
    """Return the functions of a mask and of the masks within it."""
    return [inner.keeps for inner in masks_in(mask) if inner.keeps is not None]
