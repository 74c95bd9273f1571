"""``generate`` of a model whose sequence is sharded over the ranks of a group.

Every rank is given the whole prompt, which is numbers, and runs the model on its own part of it.
From then on all ranks run the same new tokens. Each keeps the keys and values of its part of the
prompt, and of its share of the new tokens; a layer's attention is merged from what the ranks' keys
say (``distributed.decode``). Logits are those of the last rank, so all choose the same tokens.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention import distributed
from quorum_attention.counts import shown
from quorum_attention.distributed.agreement import told
from quorum_attention.distributed.peers import alive
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.integrations.transformers.closures import MaskFunction
from quorum_attention.integrations.transformers.described import DescribedMask
from quorum_attention.integrations.transformers.options import Options
from quorum_attention.integrations.transformers.whose import check_is_sharded
from quorum_attention.mask import Mask

# What ``generate`` may not be given here: other caches, and what differs between ranks. The first
# may stand in a generation config as well.
_NOT_ASKED = (
    "cache_implementation", "max_time", "prompt_lookup_num_tokens", "assistant_early_exit",
)  # fmt: skip
_NOT_GIVEN = (
    "assistant_model", "past_key_values", "synced_gpus", "inputs_embeds", "custom_generate",
)  # fmt: skip


class Progress:
    """How far a rank is with a sequence that grows.

    Attributes:
        tokens: of the whole sequence, whose keys are in caches.
        places: (keys,) int64, of the keys that this rank holds, in order; those of the tokens that
            the model runs on now are among them.
        prefills: whether the model runs on a prompt's rows, sharded, and not on new tokens.
        keeps: whether this rank keeps the tokens that the model runs on now.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = weakref.ref(group), device
        self.tokens = 0
        self.places = torch.empty(0, dtype=torch.int64, device=device)
        self.prefills = self.keeps = True
        self._held = [0] * group.size()
        self._coming = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Over which the sequence is sharded. A cache, which a caller may keep, holds this."""
        return alive(self._group)

    def begin(self, count: int) -> slice | None:
        """A forward over the next tokens: those of this rank, if they are a prompt; None: all."""
        ranks, rank = self.group.size(), self.group.rank()
        # Models do not run on no rows: a prompt shorter than that is run by all ranks.
        self._coming, self.prefills = count, not self.tokens and count >= ranks
        if self.prefills:
            edges = [count * one // ranks for one in range(ranks + 1)]
            self._held = [b - a for a, b in pairwise(edges)]
            mine, self.keeps = slice(edges[rank], edges[rank + 1]), True
            self.places = torch.arange(mine.start, mine.stop, device=self.device)
            return mine
        owner = self._held.index(min(self._held))
        self._held[owner] += count
        self.keeps = owner == rank
        if self.keeps:
            new = torch.arange(self.tokens, self.tokens + count, device=self.device)
            self.places = torch.cat([self.places, new])
        return None

    def end(self) -> None:
        """The forward is over, and its keys are in caches."""
        self.tokens += self._coming


_PROGRESS: ContextVar[Progress | None] = ContextVar("quorum_attention_generation", default=None)


def progress_here() -> Progress | None:
    """That of the ``sharded_generate`` around this call; None where there is none, or the model
    runs on a prompt: then attention is as in training."""
    progress = _PROGRESS.get()
    return None if progress is None or progress.prefills else progress


class StepMask(DescribedMask):
    """Which of this rank's keys new tokens see.

    Attributes:
        keep: (batch, 1, queries, keys of this rank) bool; None: all.
    """

    def __init__(self, keep: torch.Tensor | None, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(Mask(), sizes, sizes[3])
        self.keep = keep


def step_mask(
    progress: Progress,
    batch: int,
    queries: int,
    function: MaskFunction,
    padding: torch.Tensor | None,
    plain: bool,
) -> StepMask:
    """The mask of new tokens, tried on the places of this rank's keys.

    Args:
        function: Transformers' mask function, of positions of the whole sequence.
        padding: (batch, tokens of the whole sequence) bool, True where a token is none.
        plain: the function is causal and nothing else.
    """
    places, device = progress.places, progress.device
    sizes = (batch, 1, queries, len(places))
    if plain and queries == 1 and padding is None:
        return StepMask(None, sizes)
    rows = torch.arange(queries, device=device) + progress.tokens
    entries = torch.arange(batch, device=device)
    keep = function(
        entries[:, None, None, None], entries[:1, None, None, None], rows[:, None], places
    )
    if padding is not None:
        keep = keep & padding.to(device)[:, places][:, None, None]
    return StepMask(keep.expand(sizes), sizes)


def attend_step(
    options: Options,
    progress: Progress,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    name: str,
) -> torch.Tensor:
    """(batch, queries, heads, value_dim) of new tokens, the same on all ranks."""
    if not isinstance(mask, StepMask) or mask.sizes[3] != key.shape[2]:
        raise NotImplementedError(
            f"generate over a group keeps the keys of each rank itself; {name} has "
            f"{key.shape[2]} and a mask of {None if mask is None else tuple(mask.shape)}"
        )
    described = None
    if mask.keep is not None or softcap is not None or sinks is not None:
        described = Mask(bias=mask.keep, softcap=softcap, sinks=sinks)
    out = distributed.decode(
        query, key, value, described, group=progress.group, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1], **options.of_shard(),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


@lru_cache(maxsize=1)
def _cache_classes() -> tuple[Any, Any]:
    """Transformers' cache and one of its layers, made to hold a rank's keys. Not at import:
    Transformers takes long."""
    from transformers.cache_utils import Cache, DynamicLayer

    class ShardLayer(DynamicLayer):  # type: ignore[misc]
        """The keys and values of one rank; lengths are those of the whole sequence."""

        keys: Any
        values: Any

        def __init__(self, progress: Progress) -> None:
            super().__init__()
            self.progress = progress

        def update(self, key_states: Any, value_states: Any, *args: Any, **named: Any) -> Any:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                count = key_states.shape[-2] if self.progress.keeps else 0
                self.keys, self.values = (t[..., :count, :] for t in (key_states, value_states))
                return self.keys, self.values
            if not self.progress.keeps:
                return self.keys, self.values
            return super().update(key_states, value_states, *args, **named)

        def get_seq_length(self, *args: Any, **named: Any) -> int:
            return self.progress.tokens

        def get_mask_sizes(self, query_length: Any, *args: Any, **named: Any) -> tuple[int, int]:
            return self.progress.tokens + int(query_length), 0

        def crop(self, *args: Any, **named: Any) -> None:
            raise NotImplementedError("a cache that is sharded over ranks cannot be cropped")

    class ShardCache(Cache):  # type: ignore[misc]
        """The layers of one rank."""

        def __init__(self, progress: Progress) -> None:
            super().__init__(layers=[])
            self.layer_class_to_replicate = lambda: ShardLayer(progress)
            self.progress = progress

        def get_seq_length(self, layer_idx: int = 0, *args: Any, **named: Any) -> int:
            return self.progress.tokens

        def get_mask_sizes(
            self, query_length: Any, layer_idx: int = 0, *args: Any, **named: Any
        ) -> tuple[int, int]:
            return self.progress.tokens + int(query_length), 0

    return ShardCache, ShardLayer


def sharded_generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    **asked: Any,
) -> Any:
    """``model.generate`` with the sequence sharded over the ranks of a group.

    All ranks call it with the same prompt and arguments, and get the same tokens. The prompt's rows
    are shared evenly; new tokens are run by all ranks, and kept by the rank that holds fewest. So a
    rank has a share of the keys and values, and none is ever moved. Where tokens are sampled, all
    ranks draw with a seed that the first one draws.

    Args:
        model: its attention is that of ``register(group=...)``, over the same group; compiled, or
            with adapters of PEFT around it, if need be.
        input_ids: (batch, tokens), the whole prompt, on every rank.
        group: None is the default one.
        asked: of ``generate``; ``attention_mask`` is (batch, tokens), of the whole prompt.

    Returns:
        What ``generate`` returns, on every rank.

    Raises:
        TypeError, ValueError: arguments that make no sense, or that differ between ranks; a model
            whose attention is not over the group.
        NotImplementedError: assisted generation, other caches, time limits, ``inputs_embeds``; also
            where a generation config asks for them.
    """
    everyone = dist.group.WORLD if group is None else group
    if everyone is None:
        raise RuntimeError("there is no process group: torch.distributed.init_process_group first")
    run = whose_forward(model)
    check_is_sharded(run, everyone)
    configs = [asked.get("generation_config"), getattr(run, "generation_config", None)]
    _check_asked(input_ids, asked, configs)
    seed = _agreed_seed(everyone, input_ids, asked, configs)
    progress = Progress(everyone, input_ids.device)
    cache = _cache_classes()[0](progress)
    devices = [] if on_host(input_ids.device) else [input_ids.device]
    with _running(run, progress), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return model.generate(  # type: ignore[operator]
            input_ids, past_key_values=cache, **{**asked, "use_cache": True}
        )


def whose_forward(model: Any) -> torch.nn.Module:
    """The module that ``model.generate`` runs: that within torch's compiler and PEFT's adapters."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            found: torch.nn.Module = model
            return found


def _check_asked(input_ids: Any, asked: dict[str, Any], configs: list[Any]) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be (batch, tokens), not empty, got {shown(input_ids)}")
    for name in (*_NOT_ASKED, *_NOT_GIVEN):
        said = [asked[name]] if name in asked else []
        if not said and name in _NOT_ASKED:
            said = [getattr(config, name, None) for config in configs]
        if any(one is not None for one in said):
            raise NotImplementedError(f"generate over a group does not take {name}")
    if asked.get("use_cache") is False:
        raise NotImplementedError("generate over a group needs a cache: use_cache cannot be False")
    mask = asked.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )


def _agreed_seed(
    group: dist.ProcessGroup, input_ids: torch.Tensor, asked: dict[str, Any], configs: list[Any]
) -> int:
    """A seed that the first rank draws.

    Raises:
        ValueError: the ranks were not given the same.
    """
    mask = asked.get("attention_mask")
    ids = _number_of(input_ids) ^ (0 if mask is None else _number_of(mask.bool()))
    kinds = (bool, int, float, str, type(None), list, tuple, dict)
    plain = {n: v for n, v in asked.items() if isinstance(v, kinds)}
    written = [one.to_json_string() for one in configs if hasattr(one, "to_json_string")]
    words = zlib.crc32(repr((sorted(plain.items()), written)).encode())
    seed = int(torch.randint(2**31, (), device="cpu"))
    listed = told(group, (ids, *input_ids.shape, words, seed))
    if len({tuple(one[:3]) for one in listed}) > 1:
        raise ValueError(
            "the ranks do not agree on input_ids and attention_mask: each must be given those of "
            "the whole prompt"
        )
    if len({one[3] for one in listed}) > 1:
        raise ValueError(
            f"the ranks do not agree on the arguments; rank {group.rank()} has {plain}, and "
            f"generation configs {written}"
        )
    return listed[0][4]


def _number_of(tensor: torch.Tensor) -> int:
    """The same for tensors of the same elements."""
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())


@contextmanager
def _running(model: torch.nn.Module, progress: Progress) -> Iterator[None]:
    """The model's forwards run on this rank's rows, and give all ranks the same logits."""
    group = progress.group
    last = dist.get_global_rank(group, group.size() - 1)

    def before(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args or named.get("input_ids") is None:
            raise TypeError("a sharded model must be given input_ids by name")
        mine = progress.begin(named["input_ids"].shape[1])
        if mine is None:
            return args, named
        if named.get("attention_mask") is None:
            # A prompt is one document, also where the model tells its attention no positions.
            named = {**named, "attention_mask": torch.ones_like(named["input_ids"])}
        rows = {"input_ids", "attention_mask", "position_ids", "token_type_ids"} & set(named)
        cut = {n: named[n][..., mine] for n in rows if named[n] is not None}
        return args, {**named, **cut}

    def after(_: Any, args: Any, out: Any) -> Any:
        progress.end()
        mine = out.logits[:, -1:].contiguous()
        dist.broadcast(mine, last, group=group)
        out.logits = mine
        return out

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]
    token = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(token)
        for handle in handles:
            handle.remove()


__all__ = [
    "Progress",
    "StepMask",
    "attend_step",
    "progress_here",
    "sharded_generate",
    "step_mask",
    "whose_forward",
]
