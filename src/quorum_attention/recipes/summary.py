"""What a recipe changed in a model, what it left out, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes:
        name: of the change.
        done: whether it was made.
        how: how it was made, or why it was left out.
    """

    name: str
    done: bool
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.done else 'left out: '}{self.how}"


@dataclass(frozen=True)
class Summary:
    """All changes, in the order in which they were tried."""

    changes: tuple[Change, ...]

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the changes that were made."""
        return tuple(change.name for change in self.changes if change.done)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the changes that were not made."""
        return tuple(change.name for change in self.changes if not change.done)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes))


def left_out(name: str, why: str) -> Change:
    """A change that was not made."""
    return Change(name, False, why)


__all__ = ["Change", "Summary", "left_out"]
