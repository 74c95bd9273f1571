"""How a changed model runs its prompts: by layers, by chunks, or as it is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from quorum_attention.errors import OutOfMemoryError, first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.integrations.substitutes import substituting
from quorum_attention.integrations.transformers.cache_rollback import (
    restored_on_error,
)
from quorum_attention.integrations.transformers.prompt_cache import remove_tokens
from quorum_attention.kernels.torch_private import has_global_hooks, has_modes
from quorum_attention.plain_types import Keywords
from quorum_attention.progress import progress_bar
from quorum_attention.recipes.prefill import (
    LayeredModel,
    LayerwisePrefill,
    joined_results,
)
from quorum_attention.recipes.prompt_inputs import (
    COLLECTED,
    PromptInputs,
    cache_in,
    cache_name,
    tokens_in,
    without_cache,
)
from quorum_attention.recipes.prompt_memory import (
    CHUNK_BYTES,
    PromptPlan,
    TokenBytes,
    chunk_within,
    plan_prompt,
    smaller_plan,
    tile_behind_prompt,
)
from quorum_attention.recipes.tile_storage import DeviceTiles, HostTiles, spans_of
from quorum_attention.recipes.token_layers import TokenLayers
from quorum_attention.units import counted

# Memory for so many tokens behind a prompt is taken with the prompt's.
_TOKENS_BEHIND = 1024
_LABEL = "prefill: layers"


@dataclass
class PromptRunner:
    """Runs the prompts of one model.

    Attributes:
        device: where layers compute.
        token: bytes of a token of one text.
        working: bytes of the device that computing layers may take.
        layered: the model, if its layers can run one after the other; else prompts run
            by chunks.
        tile: the tokens of a tile or a chunk; None: as many as fit well.
        progress: whether progress is shown, or a callable (done, total, label).
        token_layers: runs in place of the layers for one token of each text, or None.
        runs_chunks: whether prompts can run by chunks; else they run whole.
    """

    device: torch.device
    token: TokenBytes
    working: int
    layered: LayeredModel | None
    tile: int | None = None
    progress: Any = None
    token_layers: TokenLayers | None = None
    runs_chunks: bool = True

    def run(
        self, run_model: Callable[..., Any], model: Any, named: Mapping[str, Any]
    ) -> Any:
        """Return what the model's forward returns.

        Args:
            run_model: the model's own forward.
            model: the model.
            named: the arguments.

        Raises:
            ValueError: the cache has more tokens than the prompt.
        """
        cache = cache_in(named)
        if torch.compiler.is_compiling() or needs_no_runner(named):
            return run_model(model, **named)
        _check_text(named)
        inputs = self._read_prompt(model, named)
        with restored_on_error(cache):
            if inputs is None:
                return run_model(model, **named)
            return self._run_prompt(run_model, model, named, inputs, cache)

    def _run_prompt(
        self,
        run_model: Callable[..., Any],
        model: Any,
        named: Mapping[str, Any],
        inputs: PromptInputs,
        cache: Any,
    ) -> Any:
        """Run a prompt, or a token behind it."""
        if self.token_layers is not None:
            if inputs.n_tokens == 1 and not _is_observed():
                with substituting(layer=self.token_layers.run):
                    return run_model(model, **named)
            self.token_layers.begin_answer()
        plan = self._plan(inputs.n_tokens, inputs.batch, is_behind=inputs.past > 0)
        is_short = plan.fits_at_once or inputs.n_tokens <= plan.tile
        if is_short or not self.runs_chunks:
            return run_model(model, **named)
        if self.layered is None or inputs.past:
            return self._run_chunks(run_model, model, inputs, plan.tile, cache)
        return self._run_layers(self.layered, inputs, plan, cache)

    def _read_prompt(self, model: Any, named: Mapping[str, Any]) -> PromptInputs | None:
        """The prompt in a forward's arguments; None if the model has to run as it
        is."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type):
            return None
        if _collects_results(model):
            return None
        n_cached = cache_in(named).get_seq_length()
        return PromptInputs.from_arguments(without_cache(named), n_cached)

    def _plan(self, n_tokens: int, batch: int, *, is_behind: bool) -> PromptPlan:
        token = self.token.of_batch(batch)
        plan = plan_prompt(token, n_tokens, self.working)
        if self.tile is not None:
            return plan.with_tile(self.tile)
        if self.layered is None:
            plan = plan.with_tile(chunk_within(token, self.working))
        if is_behind:
            # The cache has taken most of the memory that computing the prompt needed.
            return plan.with_tile(min(plan.tile, tile_behind_prompt(token)))
        return plan

    def _run_layers(
        self, layered: LayeredModel, inputs: PromptInputs, plan: PromptPlan, cache: Any
    ) -> Any:
        reserve = getattr(cache, "reserve", None)
        if reserve is not None:
            reserve(inputs.n_tokens, _TOKENS_BEHIND)
        backend_of(self.device).give_back_cached()
        # Rows of the prompt are freed here: the cache gets their memory.
        result = self._prefill_in_memory(layered, inputs, plan, cache)
        backend_of(self.device).give_back_cached()
        promote = getattr(cache, "promote", None)
        if promote is not None:
            promote(max(0, self.working - CHUNK_BYTES), _TOKENS_BEHIND)
        return result

    def _prefill_in_memory(
        self, layered: LayeredModel, inputs: PromptInputs, plan: PromptPlan, cache: Any
    ) -> Any:
        """Prefill by a plan. Whenever the device runs out of memory, prefill anew by
        one for half as much: somebody else may have taken some."""
        token = self.token.of_batch(inputs.batch)
        while True:
            smaller = smaller_plan(token, inputs.n_tokens, plan)
            try:
                return self._prefill(layered, inputs, plan, cache)
            except RuntimeError as error:
                if smaller is None or not _is_device_full(error):
                    raise
                # The error itself would keep the tensors of its frames.
                reason = first_line(error)
            warnings.warn(
                f"a prompt is computed anew, {counted(smaller.tile, 'token')} at a "
                f"time, after {counted(plan.tile, 'token')} at a time: {reason}",
                stacklevel=2,
            )
            plan = smaller
            backend_of(self.device).give_back_cached()

    def _prefill(
        self, layered: LayeredModel, inputs: PromptInputs, plan: PromptPlan, cache: Any
    ) -> Any:
        """Fill the cache, and return what the model's forward returns."""
        tiles = (
            DeviceTiles(self.device) if plan.is_on_device else HostTiles(self.device)
        )
        budget = plan.budget if self.device.type == "cuda" else None
        with progress_bar() as show:
            report = (
                None
                if self.progress is False
                else partial(_report, self.progress or show)
            )
            prefill = LayerwisePrefill(
                layered, inputs, cache, tiles, plan.tile, budget, report
            )
            try:
                with backend_of(self.device).current(self.device):
                    return prefill.run()
            except BaseException:
                # Some layers have the prompt's tokens, and others have none.
                remove_tokens(cache.layers)
                # Copies under way must not write into memory that others get.
                backend_of(self.device).synchronize(self.device)
                raise

    def _run_chunks(
        self,
        run_model: Callable[..., Any],
        model: Any,
        inputs: PromptInputs,
        chunk: int,
        cache: Any,
    ) -> Any:
        """Run a prompt some tokens at a time through all layers."""
        results = []
        run = partial(run_model, model, **{cache_name(run_model): cache})
        for span in spans_of(inputs.n_tokens, chunk):
            result = run(**inputs.of_tile(span))
            if inputs.has_logits(span):
                results.append(result)
        return joined_results(results)


def _is_observed() -> bool:
    """Whether somebody follows each operator or module: graphs would pass them by."""
    return has_modes() or has_global_hooks()


def _is_device_full(error: RuntimeError) -> bool:
    """Whether a device has no memory for a tensor. A cache without room in any place,
    and attention that cannot be cut finer, say so by an error of ours: smaller tiles
    would not help."""
    return is_out_of_memory(error) and not isinstance(error, OutOfMemoryError)


def _check_text(named: Mapping[str, Any]) -> None:
    """Refuse a prompt that does not go on behind what its cache has: of one that is
    shorter than that, ``generate`` leaves nothing, or tokens from its middle."""
    tokens = tokens_in(named)
    if tokens is None:
        return
    n_cached = cache_in(named).get_seq_length()
    if n_cached == 0 or _goes_on(tokens.shape[1], n_cached, named):
        return
    raise ValueError(
        f"the cache has {counted(n_cached, 'token')} already, and the prompt is "
        "shorter. A cache holds one text: call long_prompt(model) for another text, "
        "and fork the text's cache before each question about it (cache.fork())"
    )


def _goes_on(n_tokens: int, n_cached: int, named: Mapping[str, Any]) -> bool:
    """Whether tokens are those behind what a cache has, as far as can be seen.

    Args:
        n_tokens, n_cached: in the forward, and in the cache.
        named: the forward's arguments.
    """
    if n_tokens < 2:
        return n_tokens == 1
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        # Positions do not count padding, and the mask has all tokens of the text.
        return mask.shape[1] >= n_cached + n_tokens
    positions = named.get("position_ids")
    if positions is None or positions.dim() > 2 or mask is not None:
        return True
    return bool((positions[..., 0] >= n_cached).any())


def _report(show: Callable[[int, int, str], None], done: int, total: int) -> None:
    show(done, total, _LABEL)


def _collects_results(model: Any) -> bool:
    """Whether a model's configuration asks for what is only there if layers run as they
    are."""
    return any(getattr(model.config, name, False) for name in COLLECTED)


def needs_no_runner(named: Mapping[str, Any]) -> bool:
    """Whether a forward has no cache, or one of fixed size, which models are compiled
    with."""
    cache = cache_in(named)
    return not isinstance(cache, Cache) or bool(cache.is_compileable)


def is_next_token(named: Mapping[str, Any]) -> bool:
    """Whether a forward continues a cache by one token of each text."""
    tokens = tokens_in(named)
    if tokens is None or cache_in(named) is None:
        return False
    return bool(tokens.shape[1] == 1)


def named_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> Keywords:
    """Arguments of a forward by name; positional ones have the names of its
    parameters."""
    if not args:
        return dict(named)
    # The first parameter is the model.
    names = list(inspect.signature(forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **named}
