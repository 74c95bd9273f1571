"""Whether a layer computes the same in tiles, tried on a few drawn tokens, forward and
backward.

In place of attention something simple runs, in which tokens do not meet. A layer whose
tokens meet elsewhere, or that counts them, then has other results in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.recipes.lent_weights import run_with_weights
from quorum_attention.recipes.tiled_layer import TensorList, TiledLayer, without_hooks
from quorum_attention.recipes.trials import drawn, failure_words, has_hooks, is_near

# A layer is tried on so many tokens at most.
_TRIED_TOKENS = 64


def reason_to_run_whole(layer: TiledLayer, hidden: torch.Tensor) -> str | None:
    """Return why a layer is not computed in tiles; None if it can be, with
    ``layer.weights`` set.

    Args:
        layer: the layer.
        hidden: its input, (batch, tokens, width).
    """
    reason = _reason_from_inputs(layer) or _reason_from_module(layer.module)
    if reason is not None:
        return reason
    # Statistics of tokens that are drawn are not kept; those of tiles would differ.
    buffers = {name: buffer.clone() for name, buffer in layer.module.named_buffers()}
    copies = dict(buffers)
    try:
        is_same = _is_same_in_tiles(layer, hidden, buffers)
    except Exception as error:  # whatever it is, the layer runs whole
        return failure_words(error)
    if is_same and not _are_written(buffers, copies):
        return None
    return "it has other results for parts of the tokens"


def _reason_from_inputs(layer: TiledLayer) -> str | None:
    """Return what a layer is given that cannot be cut into tiles."""
    from quorum_attention.integrations.transformers.masks import DescribedMask

    cut = (type(None), bool, int, float, str, DescribedMask, torch.Tensor)
    arguments = [*layer.call.args, *layer.call.named.values()]
    for leaf in tree_leaves(arguments, is_leaf=lambda part: isinstance(part, dict)):
        if not isinstance(leaf, cut) or getattr(leaf, "requires_grad", False):
            return (
                f"it is given a {type(leaf).__name__}, or a tensor that has a gradient"
            )
    return None


def _reason_from_module(module: torch.nn.Module) -> str | None:
    """Return who looks on while a layer runs."""
    # These have a graph, which is not of this layer.
    has_computed_weights = not all(weight.is_leaf for weight in module.parameters())
    if has_hooks(module) or has_computed_weights:
        return "it has hooks, or weights that are computed"
    return None


def _are_written(buffers: NamedTensors, copies: NamedTensors) -> bool:
    """Whether a trial has replaced a module's buffers, or written to them."""
    return any(
        buffers[name] is not copy or copy._version for name, copy in copies.items()
    )


def _is_same_in_tiles(
    layer: TiledLayer, hidden: torch.Tensor, buffers: NamedTensors
) -> bool:
    """Whether results and gradients of a few tokens are the same, whole and in
    tiles."""
    n_tokens = min(
        layer.n_tokens, max(_TRIED_TOKENS // 4, min(_TRIED_TOKENS, 2 * layer.tile))
    )
    small = replace(
        layer,
        tile=n_tokens // 2 + 1,
        attend=_attend_each_alone,
        guard=partial(_guarded, layer.module, buffers),
    )
    x, upstream = drawn(2, hidden.shape[0], n_tokens, hidden.shape[2]).to(hidden)
    x = (x / 100).requires_grad_()  # small beside what the layer adds to it
    arguments_when_whole: list[Any] = []

    def attention(call: Any, query: Any, key: Any, value: Any, *mask: Any) -> Any:
        arguments_when_whole.append(_result_arguments(partial(call, *mask)))
        return _attend_each_alone(small.modes.cast(query, key, value))

    # A checkpoint around the model is not to count what is saved here.
    with (
        torch.enable_grad(),
        saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach),
    ):
        result = small.run(attention, 0, x)
        layer.weights = _learning_weights(layer.module, result, x)
        small.weights = layer.weights
        tiled_result = small(x)
        learned = [x, *layer.weights]
        with without_hooks(layer.weights):
            grads, tiled_grads = (
                torch.autograd.grad(output, learned, upstream, allow_unused=True)
                for output in (result, tiled_result)
            )
    # One tile tells attention the same as all tokens.
    if arguments_when_whole != [_result_arguments(small.attention_call)]:
        return False
    tolerance = max(8 * torch.finfo(small.modes.dtype).eps, 1e-5)
    if not _is_like(result, tiled_result, tolerance):
        return False
    # A token may meet other experts.
    tolerances = [tolerance, *(tolerance**0.5 for _ in layer.weights)]
    return all(map(_is_like, grads, tiled_grads, tolerances))


def _learning_weights(
    module: torch.nn.Module, result: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor]:
    """Return the weights that learn of a result. Some experts have no token of these;
    and a weight may be of another module."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    leaves = dict.fromkeys([*weights, *_leaves_of(result)])
    return [leaf for leaf in leaves if leaf is not x]


def _leaves_of(result: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that get gradients when this one is gone back from."""
    waiting = [get_gradient_edge(result).node]
    nodes = set()
    while waiting:
        node = waiting.pop()
        nodes.add(node)
        inputs = [before for before, _ in node.next_functions if before is not None]
        waiting += [before for before in inputs if before not in nodes]
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _attend_each_alone(heads: TensorList) -> torch.Tensor:
    """Compute something of each token alone, in place of attention."""
    for tensor in heads:
        tensor.requires_grad_()
    query, key, value = heads
    n_shared = query.shape[1] // key.shape[1]
    key_factors = 1 + key.mean(-1, keepdim=True)
    query_factors = 1 + query.mean(-1, keepdim=True)
    scaled = value * key_factors
    scaled = scaled.repeat_interleave(n_shared, dim=1)
    return scaled * query_factors


def _result_arguments(call: Any) -> list[Any]:
    """Return what an attention's result depends on, beside q, k and v."""
    from quorum_attention.integrations.transformers.attention_function import (
        WITHOUT_EFFECT,
    )

    named = [
        value for name, value in call.keywords.items() if name not in WITHOUT_EFFECT
    ]
    return [_fingerprint(leaf) for leaf in tree_leaves([*named, *call.args[2:]])]


def _fingerprint(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.shape, leaf.is_leaf, leaf.double().sum().item()


def _is_like(
    tensor: torch.Tensor | None, approximation: torch.Tensor | None, tolerance: float
) -> bool:
    if tensor is None or approximation is None:
        return tensor is approximation
    if tensor.dtype != approximation.dtype:
        return False
    return is_near(tensor, approximation, tolerance)


def _guarded(
    module: torch.nn.Module,
    buffers: NamedTensors,
    n_numbers: int,
    run: Callable[[], Any],
) -> Any:
    """Run a module with other buffers, without dropout, and refuse ``n_numbers`` in a
    row."""
    with _TrialMode(n_numbers):
        return run_with_weights(module, buffers, run)


class _TrialMode(TorchFunctionMode):
    """Without dropout: each token has its own random numbers, in tiles others.

    Before its attention a layer is refused ``n_numbers`` in a row, one of each token:
    in every tile they would begin at 0. Llama 4 scales queries by them, from the
    8,192nd on, which is not tried.
    """

    def __init__(self, n_numbers: int) -> None:
        super().__init__()
        self._n_numbers = n_numbers

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), named: Any = None
    ) -> Any:
        if function is dropout:
            return args[0]
        result = function(*args, **(named or {}))
        if function is torch.arange and len(result) == self._n_numbers:
            raise NotImplementedError("it counts its tokens")
        return result
