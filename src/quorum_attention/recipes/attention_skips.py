"""Which part of an attention module comes behind its attention.

If it is an output projection alone, the second run of a tile need not compute queries,
keys and values again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from quorum_attention.recipes.layer_calls import run_attention_module
from quorum_attention.recipes.patching import patch


@dataclass
class AttentionWatch:
    """Watches the attention module of one layer while the layer runs.

    ``attend`` is called in place of the attention.

    Attributes:
        module: the attention module, once its attention was called.
        called: names of its children that ran behind the attention, in order.
    """

    module: torch.nn.Module | None = None
    called: list[str] = field(default_factory=list)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def attend(self, call: Any, *tensors: Any) -> torch.Tensor:
        """Compute the attention, and watch what its module runs behind it."""
        result: torch.Tensor = call(*tensors)
        if self.module is not None:
            # A second attention: nothing can be skipped.
            self.called.append("")
            return result
        # The arguments are options and the module.
        module = call.args[1]
        self.module = module
        for name, child in module.named_children():
            note = partial(self._note_child, name)
            self._hooks.append(child.register_forward_pre_hook(note))
        return result

    def _note_child(self, name: str, *_: Any) -> None:
        self.called.append(name)

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def can_be_skipped(self) -> bool:
        """Whether one child ran behind the attention, and its result may be the
        module's."""
        return len(self.called) == 1 and self.called[0] != ""


def skip_attention(watches: Sequence[AttentionWatch]) -> bool:
    """Make attention modules skippable where their watches say that they may be.

    Returns:
        Whether there was any.
    """
    skippable = [watch for watch in watches if watch.can_be_skipped()]
    for watch in skippable:
        assert watch.module is not None
        output_name = watch.called[0]
        patch(watch.module, "forward", run_attention_module, output_name)
    return bool(skippable)
