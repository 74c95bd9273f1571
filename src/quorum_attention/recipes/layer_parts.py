"""The parts of a layer that a recording of it holds for good."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.integrations.transformers_private import is_output_recorder


class LayerParts:
    """The modules of a layer with their hooks, and the places of its weights.

    They are looked at for each token of each layer, which takes microseconds.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._modules = list(layer.modules())
        self._attributes = [vars(module) for module in self._modules]
        self._children = self._all_named("_modules")
        self._tensors = self._all_named("_parameters") + self._all_named("_buffers")
        hooks = self._all_named("_forward_hooks")
        self._hooks = hooks + self._all_named("_forward_pre_hooks")
        self._parts = self._list_parts()

    def _all_named(self, name: str) -> list[Any]:
        """An attribute of all modules. Compiled modules (torch.jit) lack some."""
        return [names.get(name, {}) for names in self._attributes]

    def are_unchanged(self) -> bool:
        """Whether the layer still has these parts."""
        return self._list_parts() == self._parts

    def _list_parts(self) -> list[Any]:
        parts: list[Any] = []
        parts += map(type, self._modules)
        parts += map(tuple, self._hooks)  # their numbers
        for names in self._attributes:
            parts.append(names.get("training"))
            parts.append("forward" in names)
        for children in self._children:
            parts += children.values()
        for tensors in self._tensors:
            for tensor in tensors.values():
                parts.append(_place_of(tensor))
        return parts


def _place_of(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor; None for one without an address, such as a sparse
    one."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr()


def has_own_code(module: torch.nn.Module) -> bool:
    """Whether a module runs more than its class says: hooks, or another forward. Hooks
    that record outputs for Transformers do not count."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" in vars(module) or not all(map(is_output_recorder, hooks))
