"""What a recipe did to a model, what it left out, and why."""

from __future__ import annotations

from dataclasses import dataclass

# What a recipe says where the extra is missing.
NO_LIGER = 'Liger is not installed (pip install "quorum-attention[long-context]")'


@dataclass(frozen=True)
class Ingredient:
    """One thing that a recipe puts in.

    Attributes:
        name: what it is.
        done: whether it is in.
        how: by what, or why it was left out.
    """

    name: str
    done: bool
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.done else 'left out: '}{self.how}"


@dataclass(frozen=True)
class Summary:
    """All ingredients, in the order in which they were tried."""

    ingredients: tuple[Ingredient, ...]

    @property
    def done(self) -> tuple[str, ...]:
        """Names of those that are in."""
        return tuple(one.name for one in self.ingredients if one.done)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of those that are not."""
        return tuple(one.name for one in self.ingredients if not one.done)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ingredients))


def left_out(name: str, why: str) -> Ingredient:
    """An ingredient that is not in."""
    return Ingredient(name, False, why)


__all__ = ["Ingredient", "Summary", "left_out"]
