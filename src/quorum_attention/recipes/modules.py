"""Changes of a model's modules: another ``forward``, and what was changed or left out, and why.

MLPs run some tokens at a time, after DeepSpeed's TiledMLP (Arctic Long Sequence Training): what an
MLP holds between its layers is there for one tile of tokens, and the backward computes it again:
torch's checkpoints. RMS norms run as torch's own kernel: it keeps a norm's input alone, where
Transformers' norms keep it in float32 as well and take some eight passes over it. In a call with
labels the last layer returns logits that are not computed yet; Transformers' loss of them, scaled
or capped at most, is computed some tokens at a time, each time a checkpoint.

A module whose forward somebody else has replaced (libraries of kernels, offloading, by hand) is
left as it is.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear, pad, rms_norm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.step import LOSS, MLP, NORMS, loss_tokens
from quorum_attention.sizes import counted

_OURS = "_quorum_attention_recipe"
# A module has other weights for a while: calls of other threads wait, or it might keep those.
swapping = threading.RLock()
_TRIED = 12  # tokens of a loss


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes:
        name: of the change.
        done: whether it was made.
        how: how it was made, or why it was left out.
    """

    name: str
    done: bool
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.done else 'left out: '}{self.how}"


def _has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward that its class was written with, or ours around that."""
    found, kind = vars(module).get("forward"), type(module)
    of_class = getattr(found, "__func__", None) is kind.forward  # as in a model unpickled
    (written, *_) = (one for one in kind.__mro__ if "forward" in vars(one))
    if kind.forward.__module__ != written.__module__:  # Liger's and Unsloth's, of all models
        return False
    return found is None or of_class or hasattr(found, _OURS)


def _patch_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run ``forward(plain, module, ...)``, where ``plain`` is that of its class."""
    plain = type(module).forward

    @wraps(plain)
    def ours(self: torch.nn.Module, *args: Any, **named: Any) -> Any:
        return forward(plain, self, *args, **named)

    setattr(ours, _OURS, True)
    ours.__name__ = "forward"  # what a pickled module looks up in its class
    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(ours, module)


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """The module in evaluation; afterwards each part has its own mode again."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


def _tried(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What it returns in evaluation; None: it takes no such tensor, or makes another of it."""
    try:
        with torch.no_grad(), evaluating(module):
            found = module(x)
    except Exception:  # whatever it is
        return None
    alike = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype)
    return found if alike else None


def drawn(*sizes: int) -> torch.Tensor:
    """The same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float64)


def tile_mlps(model: torch.nn.Module, tokens: int) -> Change:
    """Let every gated MLP of ``model`` work ``tokens`` tokens at a time."""
    parts = ("gate_proj", "up_proj", "down_proj")  # adapters around those are fine
    found = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts)
    ]
    if not found:
        return Change(MLP, False, "no MLP has gate_proj, up_proj, down_proj (or it has experts)")
    if not all(map(_has_own_forward, found)):
        return Change(MLP, False, "an MLP was given another forward")
    for kind, one in {type(module): module for module in found}.items():
        if not _goes_token_by_token(one):
            return Change(MLP, False, f"{kind.__name__} has other results for parts of the tokens")
    for module in found:
        _patch_forward(module, partial(_tile, tokens))
    return Change(MLP, True, f"{counted(len(found), 'MLP')}, {tokens:,} tokens at a time")


def _goes_token_by_token(module: torch.nn.Module) -> bool:
    """Tried on two tokens, (tokens, width) and (1, tokens, width): each alone has to give what both
    together give. Experts may take one of these shapes only."""
    sides = (p for p in module.gate_proj.parameters() if p.dim() == 2)  # type: ignore[union-attr]
    weight = next(sides, None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return False
    tokens, checked = drawn(2, weight.shape[1]).to(weight), 0
    for given in (tokens, tokens[None]):
        whole, *tiles = (_tried(module, part) for part in (given, *given.split(1, -2)))
        if whole is None or any(tile is None for tile in tiles):
            continue
        far = (whole - torch.cat(tiles, -2)).abs().max()  # type: ignore[arg-type]
        if not bool(far <= 100 * torch.finfo(weight.dtype).eps * whole.abs().max()):
            return False
        checked += 1
    return checked > 0


def _tile(tokens: int, plain: Any, module: torch.nn.Module, x: torch.Tensor) -> Any:
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if rows <= tokens:
        return plain(module, x)
    length = -(-x.shape[-2] // -(-rows // tokens))  # of all texts: tiles of about one length
    return _tiles(plain, module, x.split(length, -2))


@uncompiled
def _tiles(
    plain: Callable[..., Any], module: torch.nn.Module, tiles: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What comes of all tiles, each a checkpoint.

    Gradients of weights in 16 bits are summed in float32: each tile's would round the sum.
    """
    weights: dict[str, Any] = dict(module.named_parameters())
    wide = {n: w.float() for n, w in weights.items() if w.requires_grad and w.dtype.itemsize < 4}

    def run(tile: torch.Tensor) -> Any:
        held = weights | {name: copy.to(weights[name].dtype) for name, copy in wide.items()}
        with swapping, _reparametrize_module(module, held, tie_weights=True):
            return plain(module, tile)  # without its hooks, which are called once, outside

    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], -2)


def fuse_norms(model: torch.nn.Module) -> Change:
    """Let every RMS norm of ``model`` that computes what torch's does run as torch's."""
    found = [module for module in model.modules() if _epsilon(module) is not None]
    kinds = {type(module): module for module in reversed(found)}
    right = {kind for kind, module in kinds.items() if _computes_the_same(module)}
    fused = [m for m in found if type(m) in right and _has_own_forward(m)]
    if not fused:
        return Change(NORMS, False, "torch has no kernel for the norms of this model on its device")
    for module in fused:
        _patch_forward(module, partial(_fused, _epsilon(module)))
    return Change(NORMS, True, f"{counted(len(fused), 'norm')}, torch's rms_norm")


def _epsilon(module: torch.nn.Module) -> float | None:
    """Of an RMS norm with one weight; None: it is something else."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not type(module).__name__.endswith("RMSNorm"):
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _computes_the_same(module: torch.nn.Module) -> bool:
    """Tried on rows of three sizes, beside which epsilon is small, alike and large: no further
    apart than a few roundings. (Some multiply by 1 + weight, gate, or take other inputs.)"""
    weight, epsilon = module.weight, _epsilon(module)
    if type(weight) is not torch.nn.Parameter or weight.dim() != 1 or not _is_fused(weight):
        return False
    sizes = torch.tensor([[1e2], [1], [1e-2]], device="cpu", dtype=torch.float64)
    x = (drawn(3, len(weight)) * sizes * (epsilon or 1.0) ** 0.5).to(weight)
    plain = _tried(module, x)
    if plain is None:
        return False
    far = (plain.double() - rms_norm(x, weight.shape, weight, epsilon).double()).abs()
    return bool((far <= 4 * torch.finfo(x.dtype).eps * plain.double().abs()).all())


def _is_fused(weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for it where the weight lies; elsewhere it takes many."""
    with torch.enable_grad():
        x = weight.detach().clone().requires_grad_()
        return "Fused" in type(rms_norm(x, x.shape, weight, 1.0).grad_fn).__name__


def _fused(epsilon: float | None, plain: Any, module: Any, *args: Any, **named: Any) -> Any:
    x, weight = args[0] if len(args) == 1 and not named else None, module.weight
    # Autocast may give such a norm another dtype than its own forward does.
    cast = x is not None and x.dtype.itemsize < 4 and torch.is_autocast_enabled(x.device.type)
    if x is None or x.dtype != weight.dtype or cast:
        return plain(module, *args, **named)
    return rms_norm(x, weight.shape, weight, epsilon)


class _Here(threading.local):  # torch's compiler reads it; of a ContextVar it would leave its graph
    """Whether a model whose loss is in chunks runs in this thread, with labels."""

    chunks = False


_here = _Here()


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    if type(head) is not torch.nn.Linear:
        return Change(LOSS, False, f"{kind} is not a decoder with one linear output layer")
    if not _has_own_forward(model) or not _has_own_forward(head):
        return Change(LOSS, False, f"this {kind} was given another forward")
    if model.loss_function not in (ForCausalLMLoss, _chunked):
        return Change(LOSS, False, f"this {kind} has another loss than Transformers' cross entropy")
    if head.weight.device.type == "meta":
        return Change(LOSS, False, "the weights are not loaded yet")
    _patch_forward(head, _head_forward)
    _patch_forward(model, partial(_model_forward, inspect.signature(type(model).forward)))
    model.loss_function = _chunked
    why = _why_not(model)
    if why is not None:
        del model.forward, head.forward, model._loss_function
        return Change(LOSS, False, why)
    tokens = loss_tokens(head.weight.shape[0], head.weight.dtype.itemsize)
    return Change(LOSS, True, f"{tokens:,} tokens at a time; a call with labels has no logits")


def _head_forward(_: Any, head: torch.nn.Linear, states: torch.Tensor) -> Any:
    product = partial(linear, weight=head.weight, bias=head.bias)
    # A hook may ask whether they are a tensor; or the weights are there within the forward alone.
    hooks = head._forward_hooks or head._backward_hooks or head._backward_pre_hooks
    if not _here.chunks or hooks or _has_any_global_hook():
        return product(states)
    return _Logits(states, product)


def _model_forward(
    signature: inspect.Signature, plain: Any, model: Any, *args: Any, **named: Any
) -> Any:
    labels = signature.bind_partial(model, *args, **named).arguments.get("labels")
    outside = _here.chunks  # it may run within another model
    _here.chunks = labels is not None and model.loss_function is _chunked
    try:
        found = plain(model, *args, **named)
    finally:
        _here.chunks = outside
    if isinstance(found, tuple):  # by position: they have to be there
        return tree_map_only(_Logits, lambda one: one.of(one.states), found)
    return tree_map_only(_Logits, lambda one: None, found)


class _Logits:
    """In place of a tensor: logits that are not computed yet.

    Attributes:
        states: (..., width), the last layer's input.
        of: makes logits of some of them: each number by itself but for the last layer.
    """

    def __init__(self, states: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states, self.of = states, of

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function is not torch.tanh:
            raise TypeError(f"torch's {function.__name__} of logits in a loss by chunks")
        return args[0].tanh()


def _as_of_tensor(name: str) -> Callable[..., _Logits]:
    def method(self: _Logits, *numbers: float) -> _Logits:
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TypeError(f"logits in a loss by chunks: {name} of a tensor")
        return _Logits(self.states, lambda some: getattr(self.of(some), name)(*numbers))

    return method


for _name in ("__mul__", "__rmul__", "__truediv__", "contiguous", "float", "tanh"):
    setattr(_Logits, _name, _as_of_tensor(_name))


def _chunked(
    logits: torch.Tensor | _Logits, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = -100, shift_labels: torch.Tensor | None = None, **others: Any,
) -> Any:  # fmt: skip
    """Transformers' ``ForCausalLMLoss``; of logits that are not there, some tokens at a time."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    def loss(some: Any, wanted: Any) -> Any:
        if isinstance(logits, _Logits):
            some = logits.of(some)
        return ForCausalLMLoss(
            some, labels, vocab_size, num_items_in_batch, ignore_index, wanted, **others
        )

    if not isinstance(logits, _Logits):
        return loss(logits, shift_labels)
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    states, wanted = logits.states.flatten(0, -2), shift_labels.flatten()
    if len(states) != len(wanted):
        raise ValueError(f"labels must be as many as there are tokens, {len(states)}")
    if num_items_in_batch is None:
        num_items_in_batch = (wanted != ignore_index).sum()
    tokens = loss_tokens(vocab_size, states.dtype.itemsize)
    pairs = zip(states.split(tokens), wanted.split(tokens), strict=True)
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(loss, *pair, **again) for pair in pairs]).sum()


def _why_not(model: Any) -> str | None:
    """Why the loss needs all logits, if it does: tried on a few tokens."""
    try:
        words = model.get_input_embeddings().weight
        ids = torch.arange(_TRIED, device=words.device)[None] % len(words)
        with torch.no_grad(), evaluating(model):
            found = model(input_ids=ids, labels=ids)
    except BudgetError:
        raise  # attention's budget is too small for a few tokens: no fault of the loss
    except Exception as error:  # whatever it is, the model keeps its own loss
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    if getattr(found, "logits", None) is not None:
        return f"{type(model).__name__} does more to its logits than take their cross entropy"
    return None
