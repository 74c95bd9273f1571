"""A rule of positions (``Mask.keeps``), as it is sent to workers.

A function is sent by name. A worker that cannot import it would fail while it reads the message,
and could not say which pass that was; so the name is looked up on its own, and what came of that is
said by the part that asks the rule.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.counts import shown
from quorum_attention.mask import Keeps, Mask


@dataclass(frozen=True)
class Rule:
    """A rule that is read by itself where it arrives: there it is ``keeps`` again."""

    keeps: Keeps

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """What ``keeps`` says."""
        return self.keeps(batch, head, query, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (pickle.dumps(self.keeps), shown(self.keeps))


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


def _read(pickled: bytes, name: str) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return Missing(
            f"Mask.keeps must be a function that other processes can import where several devices "
            f"compute, and {name} cannot be ({type(error).__name__}: {error}): put it into a module"
        )


def with_rules(mask: Mask) -> Mask:
    """The mask with each function as a ``Rule``."""
    changes: dict[str, Any] = {
        name: tuple(with_rules(one) for one in getattr(mask, name)) for name in ("either", "every")
    }
    if mask.keeps is not None:
        changes["keeps"] = Rule(mask.keeps)
    return replace(mask, **changes)


__all__ = ["Missing", "Rule", "with_rules"]
