"""Changes of a model: made, checked in each step, and undone. The model carries them.

``long_context`` and ``long_prompt`` make changes of several kinds. Each kind is a
``ModelPiece``, and the pieces of one call are a ``ChangeSet``, which stands in an
attribute of the model. So copies of the model have a record of their own, and undo
themselves.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.kernels.torch_private import restores_modes_and_hooks
from quorum_attention.plain_types import Keywords

# The attribute of a changed model that holds its change sets, the first one first.
_CARRIED = "_quorum_attention_changes"


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes:
        name: of the change.
        done: whether it was made.
        how: how it was made, or why it was left out.
        checked: what was found to hold after it was made.
    """

    name: str
    done: bool
    how: str
    checked: str = ""

    def __str__(self) -> str:
        if not self.done:
            return f"{self.name}: left out: {self.how}"
        checked = f" (checked: {self.checked})" if self.checked else ""
        return f"{self.name}: {self.how}{checked}"


class LeftOutError(Exception):
    """A piece does not suit a model, which is as it was. The text says why."""


class ModelPiece(ABC):
    """One kind of change. It keeps what undoing needs, and finds modules in the model
    that it is given: copies of a model carry copies of its pieces.

    Attributes:
        name: of the change.
        checked: what ``why_lost`` looks at.
        repeats: whether a model may carry several such changes, by several functions.
    """

    name: str
    checked: str
    repeats: bool = False

    @abstractmethod
    def make(self, model: Any) -> str:
        """Change a model, and say how.

        Raises:
            LeftOutError: the change does not suit the model.
        """

    @abstractmethod
    def why_lost(self, model: Any) -> str | None:
        """Return what of the change does not hold, or None if all of it does."""

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Take the change back."""


@dataclass
class ChangeSet:
    """The changes that one call made.

    Attributes:
        owner: the name of the function that was called.
        pieces: in the order in which they were made.
    """

    owner: str
    pieces: list[ModelPiece] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    @restores_modes_and_hooks
    def make(self, model: Any, piece: ModelPiece) -> Change:
        """Make one change, unless the model carries it already, or it does not suit the
        model or does not take hold."""
        first = _owner_of_change(model, piece.name)
        if first is not None and not piece.repeats:
            return Change(piece.name, False, f"{first} made this change already")
        try:
            how = piece.make(model)
            reason = piece.why_lost(model)
        except LeftOutError as error:
            return Change(piece.name, False, str(error))
        except BaseException:  # an interrupt in a trial, too
            piece.undo(model)
            raise
        if reason is not None:
            piece.undo(model)
            return Change(piece.name, False, f"it did not take hold: {reason}")
        self.pieces.append(piece)
        return Change(piece.name, True, how, piece.checked)

    def hold(self, model: Any) -> bool:
        """Whether all changes hold."""
        return all(piece.why_lost(model) is None for piece in self.pieces)

    def warn_if_lost(self, model: Any) -> None:
        """Warn once of each change that does not hold any more."""
        for piece in self.pieces:
            reason = None if piece.name in self._warned else piece.why_lost(model)
            if reason is None:
                continue
            self._warned.add(piece.name)
            warnings.warn(
                f"{self.owner} changed this {type(model).__name__}, and its "
                f"{piece.name} does not hold any more: {reason}",
                stacklevel=3,
            )

    def undo(self, model: Any) -> None:
        """Take all changes back, the last one first."""
        for piece in reversed(self.pieces):
            piece.undo(model)


def base_model(model: Any) -> Any:
    """Return the ``PreTrainedModel`` that a model is, or that PEFT's is around.

    Raises:
        TypeError: there is none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "set_attn_implementation"):
        raise TypeError(
            f"model must be a PreTrainedModel of Transformers, got {type(model)}: "
            "leave another model as it is, and run its forward and backward inside "
            "`with quorum_attention.patched_sdpa():`"
        )
    return base


@contextmanager
def changing(model: Any, owner: str) -> Iterator[ChangeSet]:
    """Begin the changes of a call, and undo them if it fails. What an earlier call of
    the same function changed is undone first."""
    undo_changes(model, owner)
    changes = ChangeSet(owner)
    setattr(model, _CARRIED, (*_change_sets(model), changes))
    try:
        yield changes
    except BaseException:
        undo_changes(model, owner)
        raise


def changes_by(model: Any, owner: str) -> ChangeSet | None:
    """Return what the last call of a function changed in a model, or None."""
    for changes in _change_sets(model):
        if changes.owner == owner:
            return changes
    return None


def names_of_changes(model: Any) -> tuple[str, ...]:
    """Return the names of all changes that a model carries."""
    pieces = [piece for changes in _change_sets(model) for piece in changes.pieces]
    return tuple(piece.name for piece in pieces)


def _owner_of_change(model: Any, name: str) -> str | None:
    """Return the name of the function that made a change; None if none did."""
    for changes in _change_sets(model):
        if any(piece.name == name for piece in changes.pieces):
            return changes.owner
    return None


def undo_changes(model: Any, owner: str) -> None:
    """Undo what a function changed in a model, and first all that was changed after
    that.

    Raises:
        RuntimeError: a library has made other classes of changed modules since.
    """
    while changes_by(model, owner) is not None:
        *earlier, last = _change_sets(model)
        last.undo(model)
        # Copies of a model share the tuple, which stays as it is.
        setattr(model, _CARRIED, tuple(earlier))
        if not earlier:
            delattr(model, _CARRIED)


def warn_of_lost_changes(model: Any) -> None:
    """Warn once of each change of a model that does not hold any more."""
    for changes in _change_sets(model):
        changes.warn_if_lost(model)


def _change_sets(model: Any) -> tuple[ChangeSet, ...]:
    change_sets: tuple[ChangeSet, ...] = vars(model).get(_CARRIED, ())
    return change_sets


class AttributeRecord:
    """Attributes of a model's modules that were set within ``recording``, as they were
    before."""

    def __init__(self) -> None:
        # By the module's name: the attributes, and the values that they had, if any.
        self._before: dict[str, tuple[list[str], Keywords]] = {}

    @contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Note which attributes are set meanwhile."""
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        try:
            yield
        finally:
            self._note_changes(model, before)

    def _note_changes(
        self, model: torch.nn.Module, before: dict[str, Keywords]
    ) -> None:
        """Note what is not as in ``before``, the attributes by the module's name."""
        for name, module in model.named_modules():
            former = before.get(name, {})
            changed = [
                attribute
                for attribute, value in vars(module).items()
                if attribute not in former or former[attribute] is not value
            ]
            if changed:
                present = former.keys() & changed
                values = {attribute: former[attribute] for attribute in present}
                self._before[name] = (changed, values)

    def restore(self, model: torch.nn.Module) -> None:
        """Set these attributes as they were before. Modules that are gone are left
        out."""
        modules = dict(model.named_modules())
        for name in self._before.keys() & modules.keys():
            changed, values = self._before[name]
            attributes = modules[name].__dict__
            for attribute in changed:
                attributes.pop(attribute, None)
            attributes.update(values)
