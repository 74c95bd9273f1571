"""Options and masks of a call as one string, and back: an operator of torch's takes no objects.

Plain values are spelled out, so a graph that was saved means the same in another process. Whole
numbers and tensors, which may differ from call to call in one graph, are taken out: the string says
where they stand among the operator's arguments. Objects (a kernel, a plan, a report, a callable)
are numbered, for as long as they live: whoever made the graph has them.
"""

from __future__ import annotations

import ast
import itertools
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

from quorum_attention.call.options import Written
from quorum_attention.mask import Mask

# Fields of a Mask that are spelled; its bias and its sinks are arguments of their own.
_FIELDS = (
    "causal", "offset", "window", "chunk", "documents", "key_lengths", "key_padding", "keeps",
    "either", "every", "softcap",
)  # fmt: skip


class Parts:
    """What has been taken out of options and masks. (torch's compiler traces its use.)

    Attributes:
        numbers, tensors, objects: in the order in which they were met.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []

    def form(self, value: Any) -> Any:
        """``value`` with numbers and tensors, objects and masks replaced by where they are."""
        if value is None or isinstance(value, (str, bool, float, torch.device)):
            return value
        if isinstance(value, int):
            self.numbers.append(value)
            return ("number", len(self.numbers) - 1)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return ("tensor", len(self.tensors) - 1)
        if isinstance(value, Mask):
            return ("mask", tuple([(name, self.form(getattr(value, name))) for name in _FIELDS]))
        if type(value) is tuple or type(value) is list:
            return (type(value).__name__, tuple([self.form(item) for item in value]))
        self.objects.append(value)
        # Of an object that is made in the code it traces, torch's compiler makes up an id.
        return ("object", len(self.objects) - 1, id(value))

    def spelled(self, written: Written, mask: Mask | None) -> str | None:
        """The options of a call and its mask as a string; "" where there is nothing to say.

        None if an object is made in the code that torch's compiler traces: what it has in its place
        is empty.
        """
        if written.says_nothing and mask is None:
            return ""
        form = tuple([self.form(value) for value in written[:-1]])
        spelled_mask = self.form(mask)
        if any(map(_is_made_here, self.objects)):
            return None
        return _text((form, spelled_mask), *self.objects)


def _is_made_here(thing: Any) -> bool:
    """Whether it is a function made in the code that torch's compiler traces, which closes over
    something there: it cannot be handed to ``_text``, and has no closure in its place."""
    if not isinstance(thing, FunctionType):
        return False
    try:
        thing.__closure__  # noqa: B018
    except AttributeError:
        return True
    return False


def _text(form: Any, *objects: Any) -> str | None:
    """The form as a string. torch's compiler calls it once, while it traces, and watches that the
    objects stay the same."""
    if not all(id(objects[at]) == claimed for at, claimed in _objects(form)):
        return None
    return repr(_plain(form, [numbered(thing) for thing in objects]))


def _objects(form: Any) -> Iterator[tuple[int, int]]:
    """Of every object in a form, its place and its id."""
    if isinstance(form, tuple):
        if len(form) == 3 and form[0] == "object":
            yield form[1], form[2]
        else:
            for item in form:
                yield from _objects(item)


# What torch.compiler.assume_constant_result does, which would load the compiler.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plain(form: Any, numbers: list[str]) -> Any:
    if isinstance(form, torch.device):
        return ("device", str(form))
    if not isinstance(form, tuple):
        return form
    if len(form) == 3 and form[0] == "object":
        return ("object", numbers[form[1]])
    return tuple(_plain(item, numbers) for item in form)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    return ast.literal_eval(text)


def read(
    text: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor]
) -> tuple[Written, Mask | None]:
    """The options and the mask that were spelled.

    Raises:
        RuntimeError: an object is gone, or was one of another process.
    """
    if not text:
        return Written(), None
    form, mask = _parsed(text)
    reader = _Reader(numbers, tensors)
    named = zip(Written._fields[:-1], form, strict=True)
    written = Written(*(reader.back(value, name) for name, value in named))
    return written, reader.back(mask, "attn_mask")


def objects_of(text: str) -> list[Any]:
    """The objects that were spelled, as far as they live."""
    found = (_object.get(number, lambda: None)() for number in _numbers_in(text))
    return [thing for thing in found if thing is not None]


@lru_cache(maxsize=1024)
def _numbers_in(text: str) -> tuple[str, ...]:
    return tuple(_named(_parsed(text))) if text else ()


def _named(form: Any) -> Iterator[str]:
    if isinstance(form, tuple):
        if len(form) == 2 and form[0] == "object":
            yield form[1]
        else:
            for item in form:
                yield from _named(item)


@lru_cache(maxsize=1024)
def count(text: str) -> int:
    """How many numbers were taken out of what was spelled."""
    return 0 if not text else _most(_parsed(text))


def _most(form: Any) -> int:
    if not isinstance(form, tuple):
        return 0
    if len(form) == 2 and form[0] == "number":
        return int(form[1]) + 1
    return max(map(_most, form), default=0)


class _Reader:
    def __init__(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self.numbers, self.tensors = numbers, tensors

    def back(self, form: Any, name: str) -> Any:
        """The value of a form.

        Args:
            name: the argument's, for messages.
        """
        if not isinstance(form, tuple):
            return form
        kind, found = form
        if kind == "number":
            return int(self.numbers[found])
        if kind == "tensor":
            return self.tensors[found]
        if kind == "device":
            return torch.device(found)
        if kind == "mask":
            return Mask(**{field: self.back(value, f"Mask.{field}") for field, value in found})
        if kind == "object":
            return _known(found, name)
        items = [self.back(item, name) for item in found]
        return items if kind == "list" else tuple(items)


# --- Objects, by number -----------------------------------------------------------------------

# In numbers of objects, so that another process does not take one of its own for ours.
_HERE = uuid.uuid4().hex[:12]
_count = itertools.count()
_number: dict[int, str] = {}
_object: dict[str, Callable[[], Any]] = {}


def _known(number: str, name: str) -> Any:
    made = _object.get(number, lambda: None)()
    if made is None:
        raise RuntimeError(
            f"the object that this graph was traced with as {name} is gone, or was one of another "
            f"process: keep it as long as the graph, or trace again"
        )
    return made


def numbered(thing: Any) -> str:
    """The number of an object: the same as long as it lives."""
    known = _number.get(id(thing))
    if known is not None and known in _object and _object[known]() is thing:
        return known
    number = f"{_HERE}:{next(_count)}"

    def forget(_: Any, key: int = id(thing), number: str = number) -> None:
        _object.pop(number, None)
        if _number.get(key) == number:
            del _number[key]

    try:
        if hasattr(thing, "__self__"):  # a bound method: its weak reference would be dead at once
            raise TypeError
        _object[number] = weakref.ref(thing, forget)
    except TypeError:
        _object[number] = lambda: thing
    _number[id(thing)] = number
    return number
