"""The tensors that one layer keeps in one forward: its inputs, and the results of its
attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch

from quorum_attention.recipes.offload import KeptTensor, OffloadedTensor
from quorum_attention.recipes.tile_storage import SideStream

# Tensors of fewer bytes stay where they are.
_SMALL = 1 << 20
_Results = tuple[torch.Tensor, ...]


@dataclass(eq=False)
class ForwardStep:
    """One forward of a model.

    Attributes:
        offload_bytes: still to go to host memory, of what layers keep.
        n_recomputed: for how many further layers attention is computed again.
        result_bytes: of attention's results in one layer, as expected.
        device: of the layers.
        tile: tokens of a tile of a layer; 0: layers are not computed in tiles.
        stream: copies to host memory; None: nothing goes there.
        number: of the last layer; -1: none yet.
        previous: the last layer, weakly: the graph alone holds it.
    """

    offload_bytes: int
    n_recomputed: int
    result_bytes: int
    device: torch.device
    tile: int
    stream: SideStream | None
    number: int = -1
    previous: Callable[[], KeptLayer | None] = lambda: None


class KeptLayer:
    """The tensors that one layer keeps in one forward.

    Attributes:
        result_bytes: of attention's results so far.
    """

    def __init__(self, step: ForwardStep) -> None:
        self._step: ForwardStep | None = step  # until the layer's first run is over
        self._previous = step.previous
        self._tensors: list[KeptTensor] = []
        # For each call of attention its results, (out, lse, ...); nothing where they
        # are computed again.
        self._results: list[list[KeptTensor]] = []
        self._n_replayed = 0
        self._is_recomputed = False
        self.result_bytes = 0

    def keep(self, tensor: torch.Tensor) -> KeptTensor:
        """Keep a tensor, in host memory while some has to go there."""
        tensor = tensor.detach()  # its graph may hold this layer
        stream = self._stream_for(tensor)
        stored = KeptTensor(tensor)
        if stream is not None:
            stored = OffloadedTensor(tensor, stream)
        self._tensors.append(stored)
        return stored

    def _stream_for(self, tensor: torch.Tensor) -> SideStream | None:
        """Return what copies a tensor to host memory; None: it stays."""
        step = self._step
        if step is None or step.offload_bytes <= 0 or tensor.nbytes < _SMALL:
            return None
        step.offload_bytes -= tensor.nbytes
        # The results of a layer in tiles are in host memory.
        return step.stream if tensor.device == step.device else None

    def unpack(self, stored: KeptTensor) -> torch.Tensor:
        """Return a kept tensor: the layer's backward begins. The tensors that are
        needed next set out: attention's results, and what the previous layer keeps."""
        self._n_replayed = 0
        tensor = stored.get()
        previous = self._previous()
        upcoming = [] if previous is None else previous._tensors
        for needed in chain(*self._results, upcoming):
            needed.fetch()
        return tensor

    def results(self, compute: Callable[[], _Results]) -> _Results:
        """Return the results of a call of attention, which are kept in the first run
        and given back in the second."""
        if self._step is None:
            return self._replay(compute)
        results = compute()
        if (
            not self.result_bytes
        ):  # the first call: a rank makes several for one attention
            self._is_recomputed = self._step.n_recomputed > 0
            self._step.n_recomputed -= 1
        self.result_bytes += sum(tensor.nbytes for tensor in results)
        stored: list[KeptTensor] = []
        if not self._is_recomputed:
            stored = [self.keep(tensor) for tensor in results]
        self._results.append(stored)
        return results

    def _replay(self, compute: Callable[[], _Results]) -> _Results:
        number = self._n_replayed
        self._n_replayed += 1
        if number >= len(self._results):
            return compute()
        stored = self._results[number]
        if not stored:
            return compute()
        self._results[number] = []  # the graph has them from here on
        self._tensors = [tensor for tensor in self._tensors if tensor not in stored]
        return tuple([tensor.get() for tensor in stored])

    def finish_copies(self) -> None:
        """End the layer's first run: what is kept is what the second run has to
        read."""
        self._step = None
        for tensor in self._tensors:
            tensor.finish_copy()
