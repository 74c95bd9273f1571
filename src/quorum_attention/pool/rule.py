"""A rule of positions (``Mask.keeps``), as it is sent to workers.

A function is sent by name. A worker that cannot import it would fail while it reads the message,
and could not say which pass that was; so the name is looked up on its own, and what came of that is
said by the part that asks the rule. What a function reads (a global) is the worker's own, and may
have another value there: so some of its answers are sent along.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.kit.functions import Sample
from quorum_attention.mask import Keeps, Mask


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule that is read by itself where it arrives.

    Attributes:
        sample: some of its answers where it was sent.
    """

    keeps: Keeps
    sample: Sample

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """What ``keeps`` says."""
        return self.keeps(batch, head, query, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (pickle.dumps(self.keeps), shown(self.keeps), self.sample)


@dataclass(frozen=True)
class Missing:
    """In place of a rule that a worker could not read: raises when it is asked."""

    reason: str

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """Never returns.

        Raises:
            NotImplementedError: always, with the rule's name and the reason.
        """
        raise NotImplementedError(self.reason)


def _read(pickled: bytes, name: str, sample: Sample) -> Any:
    try:
        return Rule(pickle.loads(pickled), sample)
    except Exception as error:
        return Missing(
            f"Mask.keeps must be a function that other processes can import where several devices "
            f"compute, and {name} cannot be ({type(error).__name__}: {error}): put it into a module"
        )


def with_rules(mask: Mask, sizes: tuple[int, int, int, int], device: torch.device) -> Mask:
    """The mask with each function as a ``Rule``.

    Args:
        sizes: batch entries, heads, queries and keys of the call.
        device: where functions are asked.
    """
    changes: dict[str, Any] = {
        name: tuple(with_rules(one, sizes, device) for one in getattr(mask, name))
        for name in ("either", "every")
    }
    if mask.keeps is not None:
        changes["keeps"] = Rule(mask.keeps, Sample.draw(mask.keeps, sizes, device))
    return replace(mask, **changes)


def check_rules(mask: Mask, device: torch.device) -> None:
    """Ask the rules of a mask that has arrived for their answers.

    Raises:
        RuntimeError: one answers otherwise than where it was sent.
    """
    if isinstance(mask.keeps, Rule):
        mask.keeps.sample.check(
            mask.keeps.keeps, device,
            "in the process that made the call: what it reads differs here, because a worker "
            "imports the function by its name",
        )  # fmt: skip
    for one in (*mask.either, *mask.every):
        check_rules(one, device)


__all__ = ["Missing", "Rule", "check_rules", "with_rules"]
