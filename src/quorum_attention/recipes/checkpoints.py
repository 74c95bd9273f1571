"""Checkpoints of a model's layers that keep attention's results, so it is computed once a step.

torch's checkpoints keep a layer's input and compute the layer again in the backward. Here they also
keep the output and the lse of attention, and its second run returns those. What is kept stays on
the device while there is room beside the step's own peak; the first layers' goes to page-locked
host memory, copied beside the computation. What fits nowhere is computed again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from quorum_attention.arithmetic import round_up
from quorum_attention.autograd import result_hook
from quorum_attention.execution.device.lookup import backend_of, is_known
from quorum_attention.kernels.torch_private import lock_pages_with_threads
from quorum_attention.recipes import step as memory
from quorum_attention.recipes.layers import LayerInTiles
from quorum_attention.recipes.model_shape import ModelShape

# Of host memory in one piece: torch's page-locked memory is given in powers of two.
_PIECE = 256 << 20
_SMALL = 1 << 20  # bytes that stay where they are
_UNLIMITED = 1 << 62
_MARGIN = 0.06  # of free memory: what is left alone
_Results = tuple[torch.Tensor, torch.Tensor]


class LayerCheckpoints:
    """Called by Transformers as ``(number, layer, *inputs)`` in place of torch's ``checkpoint``.

    Args:
        model: whose decoder's layers call it.
        where: "auto", "device" or "host".
        shape: of the model; None where its configuration does not say.
        training: of which ``tokens`` and ``batch`` are those of each step.
    """

    def __init__(
        self, model: Any, where: str, shape: ModelShape | None, training: memory.Training
    ) -> None:
        self.model, self.where, self.shape, self.training = model, where, shape, training
        # The last one of each device. Layers of a model may lie on several, and replicas of it
        # (``DataParallel``) run at the same time.
        self._steps: dict[torch.device, _Step] = {}
        self._times = 1.0  # what a layer's results took, over what ``kept_bytes`` says
        self._locked = 0  # bytes of host memory that tiles of earlier steps page-locked
        self._said: set[str] = set()

    def install(self) -> bool:
        """Switch the model's checkpoints on, these where its layers take them; False: none does.

        They stay where others switch checkpoints on (again), as trainers do.
        """
        model = self.model
        model._set_gradient_checkpointing = self.set
        enable = getattr(model, "activation_checkpointing_enable", None)  # in later versions
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return bool(self._layers())

    def set(self, *args: Any, **named: Any) -> None:
        """In place of the model's method that Transformers calls."""
        type(self.model)._set_gradient_checkpointing(self.model, *args, **named)
        for number, layer in enumerate(self._layers()):
            layer._gradient_checkpointing_func = partial(self, number)

    def _layers(self) -> list[Any]:
        from transformers.modeling_layers import GradientCheckpointingLayer as Layer

        every = self.model.get_decoder().modules()
        return [one for one in every if isinstance(one, Layer) and one.gradient_checkpointing]

    def __call__(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """What ``layer`` returns of its inputs."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return checkpoint(layer, *inputs, use_reentrant=False)
        device = inputs[0].device
        step = self._steps.get(device)
        if step is None or number <= step.number:
            step = self._steps[device] = self._begin(inputs[0])
        one, step.number = _Layer(step), number
        compute = layer
        if step.tile:
            tiles = LayerInTiles(layer, inputs, step.tile)
            why = tiles.why_not(inputs[0])
            if why is None:
                compute, inputs = tiles, inputs[:1]
            elif (said := f"{type(tiles.module).__name__} runs whole: {why}") not in self._said:
                self._said.add(said)
                warnings.warn(said, stacklevel=2)

        def run(*given: Any) -> Any:  # once now, and again in the backward
            token = result_hook.set(one.results)
            try:
                return compute(*given)
            finally:
                result_hook.reset(token)

        with saved_tensors_hooks(one.keep, one.unpack):
            found = checkpoint(run, *inputs, use_reentrant=False)
        one.settle()
        step.before = ref(one)
        if 0 < step.result < one.result_bytes:
            # Of ranks: in float32, and rows that several blocks have.
            self._times *= one.result_bytes / step.result
            again = self._begin(inputs[0])
            step.away, step.recomputed, step.result = again.away, again.recomputed, again.result
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": {}}

    def _begin(self, hidden: torch.Tensor) -> _Step:
        """A step whose first layer has this input."""
        device, layers = hidden.device, len(self._layers())
        host = host_room() if device.type == "cuda" and self.where != "device" else 0
        checkpoint_bytes, result, tile = hidden.nbytes, 0, 0
        room = 0 if host else _UNLIMITED
        if self.shape is not None and is_known(device):
            tokens, width = hidden.shape[-2:]
            batch, grain = hidden.numel() // (tokens * width), 1 << max(0, tokens.bit_length() - 4)
            tokens = round_up(tokens, grain)  # few lengths to be planned for
            training = replace(self.training, batch=batch, tokens=tokens, dtype=hidden.dtype)
            if memory.ATTENTION in training.on:
                checkpoint_bytes, result = memory.kept_bytes(self.shape, training)
                result = ceil(result * self._times)
            learned = (p for p in self.model.parameters() if p.requires_grad)
            later = sum(p.nbytes for p in learned if p.grad is None)
            free = int(backend_of(device).free_bytes(device) * (1 - _MARGIN))
            left = free - later - 2 * (checkpoint_bytes + result)
            if host and result and not memory.layer_fits(self.shape, training, left):
                locked, others = memory.tiled_bytes(self.shape, training)
                host = max(0, host - others - max(0, locked - self._locked))
                self._locked = max(locked, self._locked)
                tile, room = max(1, memory.MLP_TILE // batch), 0
            else:
                room = max(0, free - memory.transient_bytes(self.shape, training) - later)
        # Layers come back from host memory, one used and one on its way, when those on the device
        # are done with: in their room.
        if host and (self.where == "host" or room < 2 * (checkpoint_bytes + result)):
            room = 0
        away, recomputed = memory.shares(layers, checkpoint_bytes, result, room, host)
        return _Step(away, recomputed, result, device, tile, _HostCopies(device) if host else None)


@dataclass(eq=False)
class _Step:
    """One forward: how much of what its layers keep is still to go to host memory, for how many
    layers attention is computed again, and the bytes that its results are expected to take in one;
    tokens of a tile of a layer, 0 where it is computed whole; the last layer, which the graph alone
    holds, and its number."""

    away: int
    recomputed: int
    result: int
    device: torch.device
    tile: int
    copies: _HostCopies | None
    number: int = -1
    before: Callable[[], _Layer | None] = lambda: None


class _Layer:
    """What one layer keeps in one forward."""

    def __init__(self, step: _Step) -> None:
        self._step: _Step | None = step  # until its first run is over
        self._before = step.before
        self._kept: list[_StoredTensor] = []
        self._results: list[
            list[_StoredTensor]
        ] = []  # of each call of attention; none if computed again
        self._again = self.result_bytes = 0
        self._computed_again = False

    def keep(self, tensor: torch.Tensor) -> _StoredTensor:
        """In host memory while some has to go there."""
        step, copies = self._step, None
        if step is not None and step.away > 0 and tensor.nbytes >= _SMALL:
            step.away -= tensor.nbytes
            # Of a layer in tiles, attention's results are there.
            copies = step.copies if tensor.device == step.device else None
        kept = _StoredTensor(tensor.detach(), copies)  # its graph may hold this layer
        self._kept.append(kept)
        return kept

    def unpack(self, kept: _StoredTensor) -> torch.Tensor:
        """It is needed: the layer's backward begins. What the next one needs may set out."""
        self._again = 0
        found = kept.get()
        before = self._before()
        for one in [*chain(*self._results), *(before._kept if before is not None else ())]:
            one.fetch()
        return found

    def results(self, compute: Callable[[], _Results]) -> _Results:
        """Of a call of attention: computed and kept in the first run, given in the second."""
        step = self._step
        if step is not None:
            results = compute()
            if not self.result_bytes:  # the first call: a rank makes several for one attention
                self._computed_again, step.recomputed = step.recomputed > 0, step.recomputed - 1
            self.result_bytes += sum(one.nbytes for one in results)
            self._results.append([] if self._computed_again else [*map(self.keep, results)])
            return results
        number, self._again = self._again, self._again + 1
        kept = self._results[number] if number < len(self._results) else []
        if not kept:
            return compute()
        self._results[number] = []  # the graph has them from here on
        self._kept = [one for one in self._kept if one not in kept]
        out, lse = (one.get() for one in kept)
        return out, lse

    def settle(self) -> None:
        """Its first run is over: what is kept is what the second run has to read."""
        self._step = None
        for kept in self._kept:
            kept.settle()


class _StoredTensor:
    """A tensor that is kept: where it is, or in page-locked host memory. Copies both ways run
    beside the computation."""

    # Bytes of all in host memory, and the most there ever were: torch keeps that for later ones.
    alive = most = 0

    def __init__(self, tensor: torch.Tensor, copies: _HostCopies | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version, self._device, self._copies = tensor._version, tensor.device, copies
        self._bytes = 0
        if copies is None:
            return
        self._like = torch.empty_like(tensor, device="meta")  # its layout, without gaps
        dense = tensor if tensor.stride() == self._like.stride() else tensor.clone()
        self._back: tuple[torch.Tensor, Any] | None = None
        parts = _flat(dense).split(_PIECE)
        self._pieces = [copies.host_memory(part.numel()) for part in parts]
        # The computation waits before its memory is used again: a host far ahead of the device
        # would find none free.
        self._source: Any = dense, copies.run(parts, self._pieces)
        self._bytes = sum(1 << (part.numel() - 1).bit_length() for part in parts)
        _StoredTensor.alive += self._bytes
        _StoredTensor.most = max(_StoredTensor.most, _StoredTensor.alive)

    def __del__(self) -> None:
        _StoredTensor.alive -= getattr(self, "_bytes", 0)
        if getattr(self, "_back", None) is not None:
            self.get()  # on its way, and not asked for

    def settle(self) -> None:
        """It is as it was when it was given. (Where there are hooks torch does not look.) If it is
        copied, the computation waits for the copy, and it is let go of."""
        if self._copies is not None and self._tensor is not None:
            self._copies.wait(self._source[1])
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "a layer's input or attention's output, which its checkpoint keeps, was written to "
                "in place: use long_context(checkpoints=None)"
            )
        if self._copies is not None:
            self._tensor = self._source = None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._copies is not None and self._back is None:
            back = torch.empty_like(self._like, device=self._device)
            self._back = back, self._copies.run(self._pieces, _flat(back).split(_PIECE))

    def get(self) -> torch.Tensor:
        """It, here."""
        self.settle()
        if self._copies is None:
            assert self._tensor is not None
            return self._tensor.detach()
        self.fetch()
        assert self._back is not None
        (back, done), self._back = self._back, None
        self._copies.wait(done)
        return back


class _HostCopies:
    """Copies between a device and page-locked memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        lock_pages_with_threads()

    def host_memory(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def run(self, sources: Any, targets: Any) -> Any:
        """Copy when all that the computation has been given so far is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, done: Any) -> None:
        """Let the computation wait for that."""
        torch.cuda.current_stream(self._device).wait_event(done)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_room() -> int:
    """Bytes of host memory that this rank may page-lock: its share of what the machine and the
    process's group have free, less a sixth, and what torch holds from earlier steps."""
    host = torch.device("cpu")
    free, group = backend_of(host).free_bytes(host), Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit, or none that is known
        sizes = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        taken = int((group / "memory.current").read_text()) - int(sizes["inactive_file"])
        free = min(free, int((group / "memory.max").read_text()) - taken)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # of this host, under torchrun
    return page_locked_share(max(0, free)) // ranks + _StoredTensor.most - _StoredTensor.alive


def page_locked_share(host_bytes: int) -> int:
    """Bytes of host memory that checkpoints page-lock at most: all but a sixth."""
    return host_bytes * 5 // 6
