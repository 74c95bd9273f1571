"""States that layers of a model hand on to later layers, beside hidden states.

Gemma's last layers read keys and values of earlier layers. All layers of a forward are
given one dict for that, which is empty at first.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quorum_attention.recipes.tile_storage import DeviceTiles


class HandedStates(UserDict[Any, Any]):
    """The dict of one tile of a prompt. Tensors lie where rows of all tokens lie.

    It is no ``dict``: torch's functions on trees would copy one, and layers would not
    see what others put into it.

    Args:
        tiles: keeps rows of all tokens.
    """

    def __init__(self, tiles: DeviceTiles) -> None:
        super().__init__()
        self._tiles = tiles

    def __setitem__(self, name: Any, states: Any) -> None:
        self.data[name] = tree_map_only(torch.Tensor, self._tiles.stash, states)

    def __getitem__(self, name: Any) -> Any:
        return tree_map_only(torch.Tensor, self._tiles.unstash, self.data[name])


def hands_states_on(argument: Any) -> bool:
    """Whether an argument of a decoder layer is a dict for states of layers. No layer
    has run yet, so such a dict is empty."""
    return isinstance(argument, MutableMapping) and not argument
