"""A module's weights, as inputs of a function that computes the module again in its backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

_Place = tuple[torch.nn.Module, str]  # a module and the name of one of its weights
# Of each module one: held beside the module, it could be neither copied nor pickled.
_locks: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


class Weights:
    """All weights of a module at the time of a forward, and the places where they are.

    In the backward the module has to hold these again, whatever it holds by then. Trained weights
    are swapped in as leaves of their own, so that hooks, ``.grad`` and the graph behind the
    module's own weights stay untouched. The others stay what they are, with whatever belongs to
    them (the scales of a quantized weight, say).

    The module is changed meanwhile, as by ``torch.func.functional_call``. Other threads that swap
    or gather wait; threads that read the module in another way with gradients must not run.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._learning: list[list[_Place]] = []
        self._fixed: list[tuple[_Place, torch.Tensor, int]] = []
        self._taken: list[torch.Tensor] = []
        self._lock = _lock_of(module)
        with self._lock:
            self._gather(module)

    def _gather(self, module: torch.nn.Module) -> None:
        numbers: dict[int, int] = {}
        for owner in module.modules():
            for name, weight in (*owner._parameters.items(), *_views(owner)):
                if weight is None:
                    continue
                if not weight.requires_grad:
                    self._fixed.append(((owner, name), weight, _version(weight)))
                    continue
                number = numbers.setdefault(id(weight), len(self._taken))
                if number == len(self._taken):
                    self._taken.append(weight)
                    self._learning.append([])
                self._learning[number].append((owner, name))

    def taken(self) -> list[torch.Tensor]:
        """Those that require gradients, each once, wherever it is tied. Once: the graph has them.

        Held here as well, they would stay where the graph's hooks move what it keeps elsewhere.
        """
        learning, self._taken = self._taken, []
        return learning

    @contextmanager
    def swapped_in(self, learning: Sequence[torch.Tensor]) -> Iterator[Leaves]:
        """The module with leaves in place of ``learning``; then with what it had."""
        for (owner, name), weight, version in self._fixed:
            if _version(weight) != version:
                raise RuntimeError(
                    f"the weight {name!r} of {type(owner).__name__}, needed for a gradient, has "
                    "been changed in place since the forward of the tiled MLP"
                )
        leaves = Leaves(learning)
        swaps = [(place, weight) for place, weight, _ in self._fixed]
        for places, leaf in zip(self._learning, leaves.tensors, strict=True):
            swaps.extend((place, leaf) for place in places)
        with self._lock:
            had = [_put(place, weight) for place, weight in swaps]
            try:
                yield leaves
            finally:
                for (place, _), before in zip(swaps, had, strict=True):
                    _put(place, before)


class Leaves:
    """Weights as leaves of a graph, whose gradients are summed up over several backwards.

    In 16 bits the sum is in float32: each of many terms rounds it otherwise, which one product
    over all tokens does not.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.tensors = [weight.detach().requires_grad_() for weight in weights]
        self._sums: dict[int, torch.Tensor] = {}
        for number, leaf in enumerate(self.tensors):
            if leaf.dtype in (torch.float16, torch.bfloat16):
                leaf.register_post_accumulate_grad_hook(self._taker(number))

    def _taker(self, number: int) -> Any:
        sums = self._sums

        def take(leaf: torch.Tensor) -> None:
            if (gradient := leaf.grad) is None:
                return
            leaf.grad = None
            if number in sums:
                sums[number] += gradient
            else:
                sums[number] = gradient.float()

        return take

    def gradients(self) -> Iterator[torch.Tensor | None]:
        """Each leaf's, in its dtype; None where there came none. They are given away."""
        for number, leaf in enumerate(self.tensors):
            total = self._sums.pop(number, None)
            yield leaf.grad if total is None else total.to(leaf.dtype)
            leaf.grad = None

    def refuse_others(self, out: torch.Tensor, tokens: torch.Tensor) -> None:
        """An error if ``out`` depends on any other leaf than ``tokens``: that would get nothing."""
        nodes, seen = [out.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name().endswith("AccumulateGrad"):
                leaf: Any = node.variable  # type: ignore[attr-defined]
                if not any(leaf is known for known in (tokens, *self.tensors)):
                    raise RuntimeError(
                        f"a tiled MLP uses a tensor of shape {tuple(leaf.shape)} that requires a "
                        "gradient and is none of its parameters: leave it as it is (mlp_tile=None)"
                    )
            nodes.extend(following for following, _ in node.next_functions)


def _views(owner: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of a parameter that stand where a module's own were: FSDP1 puts such there in a
    backward, where checkpoints compute a layer again."""
    for name, held in vars(owner).items():
        if name in owner._parameters or not isinstance(held, torch.Tensor):
            continue
        if held.requires_grad and isinstance(held._base, torch.nn.Parameter):
            yield name, held


def _lock_of(module: torch.nn.Module) -> threading.RLock:
    with _making:
        return _locks.setdefault(module, threading.RLock())


def _put(place: _Place, weight: torch.Tensor) -> Any:
    """Put a weight into its place, and give what was there."""
    owner, name = place
    # FSDP puts views of its flat parameter beside the parameters.
    held: Any = vars(owner) if name in vars(owner) else owner._parameters
    before = held[name]
    held[name] = weight
    return before


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


__all__ = ["Leaves", "Weights"]
