"""What a long prompt takes, before it is run: bytes by place, seconds of prefill and of
a token."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.arithmetic import ceil_div, last_fitting, power_of_two_from
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.long_prompts.places import staging_bytes
from quorum_attention.mask import Mask
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner import plan
from quorum_attention.recipes.cpu_rates import measure_cpu
from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.prompt_memory import (
    CHUNK_BYTES,
    MARGIN,
    PromptPlan,
    TokenBytes,
    page_locked_bytes,
    plan_prompt,
    working_bytes,
)
from quorum_attention.units import format_bytes

# Rates of an H200's host and memory, measured: bytes a second that attention of one
# query reads on the device, and across the bus; and that a disk gives.
_DEVICE_RATE = 2.8e12
_BUS_RATE = 51e9
# And on the host's cores, while the bus reads the same memory.
_CORES_BESIDE_BUS_RATE = 65e9
_DISK_RATE = 2e9
# FLOP/s of a layer's matrix products in 16 bits.
_MATRIX_RATE = 600e12
# Bytes a second of what is computed number by number (norms, activations, rotations),
# and how many times a tile's numbers are read or written for that: rows that wait for
# attention are stored, and loaded again.
_ELEMENT_RATE = 3.5e12
_PASSES = 8.0
_PASSES_AT_ONCE = 3.0
# Seconds of the host for a layer of one token, what a layer in host memory takes beside
# that, what cores need to begin, and seconds of the host for a layer of one tile.
_LAYER_SECONDS = 0.34e-3
_HOST_LAYER_SECONDS = 0.7e-3
_CORES_BEGIN_SECONDS = 1.0e-3
_TILE_SECONDS = 1.7e-3
# Bytes of host memory that are page-locked in a second: measured, 7 to 8.
_LOCK_RATE = 7e9
# The longest prompt is told in steps of so many tokens, up to a billion.
_PROMPT_GRAIN = 1024
_MAX_PROMPT = 1 << 30


@dataclass(frozen=True)
class PartBytes:
    """One part of a prompt, with its bytes in each place."""

    name: str
    device: int = 0
    host: int = 0
    file: int = 0


@dataclass(frozen=True)
class PromptEstimate:
    """A long prompt before it is run.

    Attributes:
        tokens, generate: of the prompt, and after it.
        parts: bytes of weights, cache and working memory, by place.
        plan: how layers are computed.
        prefill_seconds: until the first token.
        token_seconds: of each further token.
        missing_bytes: for which no place has room; 0: all fits.
        advice: what would make it fit, or faster.
    """

    tokens: int
    generate: int
    parts: tuple[PartBytes, ...]
    plan: PromptPlan
    prefill_seconds: float
    token_seconds: float
    missing_bytes: int
    advice: str

    @property
    def fits(self) -> bool:
        """Whether all parts have a place."""
        return self.missing_bytes == 0

    def total(self, place: str) -> int:
        """Bytes of all parts in "device", "host" or "file"."""
        return sum(getattr(part, place) for part in self.parts)

    def to_dict(self) -> JsonObject:
        """In plain types."""
        return {**asdict(self), "fits": self.fits}


@dataclass(frozen=True)
class PromptRequest:
    """A prompt, and the machine that it runs on.

    Attributes:
        tokens: of the prompt.
        generate: tokens after it.
        device_memory: bytes of the device that the model may take in all.
        host_memory: bytes of host memory that may be page-locked; None: as many as are
            needed.
        has_folder: whether files take what neither has room for.
        weights: of layers, on the "device" or in "host" memory.
        dtype: of weights and cache.
        device: the kind of device.
    """

    tokens: int
    generate: int
    device_memory: int
    host_memory: int | None = None
    has_folder: bool = False
    weights: str = "device"
    dtype: torch.dtype = torch.bfloat16
    device: str = GPU

    def __post_init__(self) -> None:
        whole_number(self.tokens, "tokens", 1)
        whole_number(self.generate, "generate", 0)
        whole_number(self.device_memory, "device_memory", 1)
        one_of(self.weights, "weights", ("device", "host"))


@dataclass(frozen=True)
class _PromptParts:
    """Where the parts of a prompt lie.

    Attributes:
        weights, cache, working: bytes by place.
        working_limit: bytes of the device that computing layers may take.
        plan: how layers are computed.
        missing_bytes: for which no place has room.
        missing_cache_bytes: of these, the cache's.
    """

    weights: PartBytes
    cache: PartBytes
    working: PartBytes
    working_limit: int
    plan: PromptPlan
    missing_bytes: int
    missing_cache_bytes: int


def estimate_prompt(shape: ModelShape, request: PromptRequest) -> PromptEstimate:
    """Say what a long prompt takes.

    Raises:
        ValueError: the weights alone do not fit on the device.
    """
    token = TokenBytes.from_shape(shape, request.dtype.itemsize)
    placed = _place(shape, request, token)
    weights = placed.weights
    cache = placed.cache
    promoted = _promoted(cache, placed.working_limit)
    return PromptEstimate(
        tokens=request.tokens,
        generate=request.generate,
        parts=(weights, cache, placed.working),
        plan=placed.plan,
        prefill_seconds=_prefill_seconds(shape, request, token, placed.plan),
        token_seconds=_token_seconds(shape, request, weights, promoted),
        missing_bytes=placed.missing_bytes,
        advice=_advice(placed, request),
    )


def weights_fit(shape: ModelShape, request: PromptRequest) -> bool:
    """Whether the weights leave room on the device."""
    return _free_beside(_weights(shape, request), request) > 0


def longest_prompt(shape: ModelShape, request: PromptRequest) -> int:
    """Return the longest prompt that fits, with the tokens behind it.

    Args:
        request: its ``tokens`` are not looked at.

    Returns:
        A multiple of 1,024 tokens, at most 1,024 times 1M; 0 if none fits.
    """
    if not weights_fit(shape, request):
        return 0
    token = TokenBytes.from_shape(shape, request.dtype.itemsize)

    def fits(n_grains: int) -> bool:
        longer = replace(request, tokens=n_grains * _PROMPT_GRAIN)
        return _place(shape, longer, token).missing_bytes == 0

    return last_fitting(_MAX_PROMPT // _PROMPT_GRAIN, fits) * _PROMPT_GRAIN


def _place(
    shape: ModelShape, request: PromptRequest, token: TokenBytes
) -> _PromptParts:
    """Choose a place for each part.

    Raises:
        ValueError: the weights alone do not fit on the device.
    """
    weights = _weights(shape, request)
    free = _free_beside(weights, request)
    if free <= 0:
        hint = "" if request.weights == "host" else ': try weights="host"'
        raise ValueError(
            f"the weights take {format_bytes(weights.device)} of the device, which has "
            f"{format_bytes(request.device_memory)}{hint}"
        )
    working_limit = working_bytes(free)
    layers = plan_prompt(token, request.tokens, working_limit)
    n_cached = request.tokens + request.generate
    n_numbers = sum(layer.numbers(n_cached) for layer in shape.caches())
    cache_bytes = n_numbers * request.dtype.itemsize
    cache_limit = free - working_limit
    if request.device == GPU:
        rows_bytes = layers.host_bytes and page_locked_bytes(token, request.tokens)
        for_copies = staging_bytes(cache_limit)
        working = PartBytes("working memory", layers.device_bytes, rows_bytes)
    else:
        # The host's memory is the device's.
        for_copies = 0
        working = PartBytes("working memory", layers.device_bytes + layers.host_bytes)
        cache_limit -= layers.host_bytes
    host_limit = _host_limit(request) - weights.host - working.host
    cache, missing_cache = _place_cache(
        cache_bytes,
        max(0, cache_limit - for_copies),
        max(0, host_limit),
        request.has_folder,
    )
    # Rows of all tokens may lack memory, too.
    missing = missing_cache + max(0, -cache_limit) + max(0, -host_limit)
    if cache.host > 0:
        working = replace(working, device=working.device + for_copies)
    return _PromptParts(
        weights, cache, working, working_limit, layers, missing, missing_cache
    )


def _free_beside(weights: PartBytes, request: PromptRequest) -> int:
    """Bytes of the device beside the weights, less a margin; below 0 if they do not
    fit."""
    usable = int(request.device_memory * (1 - MARGIN))
    return usable - weights.device


def _weights(shape: ModelShape, request: PromptRequest) -> PartBytes:
    """The weights: all on the device, or those of two layers there and all in host
    memory."""
    size = request.dtype.itemsize
    n_bytes = shape.parameters * size
    if request.weights == "device":
        return PartBytes("weights", device=n_bytes)
    embedding_bytes = shape.vocabulary * shape.hidden * size
    in_layers = max(0, n_bytes - embedding_bytes)
    layer_bytes = ceil_div(in_layers, shape.layers)
    on_device = n_bytes - in_layers + 2 * layer_bytes
    if request.device == GPU:
        # Each layer's are one page-locked tensor.
        layer_bytes = power_of_two_from(max(1, layer_bytes))
    on_host = shape.layers * layer_bytes
    return PartBytes("weights", device=on_device, host=on_host)


def _host_limit(request: PromptRequest) -> int:
    """Bytes of host memory beside the device; a CPU's device memory is its host
    memory."""
    if request.device != GPU:
        return 0
    return 1 << 62 if request.host_memory is None else request.host_memory


def _place_cache(
    n_bytes: int, device_room: int, host_room: int, has_folder: bool
) -> tuple[PartBytes, int]:
    """The cache in its places, and the bytes that no place has room for."""
    on_device = min(n_bytes, device_room)
    on_host = min(n_bytes - on_device, host_room)
    rest = n_bytes - on_device - on_host
    in_files = rest if has_folder else 0
    return PartBytes("cache", on_device, on_host, in_files), rest - in_files


def _prefill_seconds(
    shape: ModelShape,
    request: PromptRequest,
    token: TokenBytes,
    prompt_plan: PromptPlan,
) -> float:
    """Seconds until the first token."""
    attention_seconds = sum(
        n_layers * _attention_seconds(shape, request, prompt_plan, window)
        for window, n_layers in shape.attention_windows().items()
    )
    tiles_seconds = _tiles_seconds(shape, request, token, prompt_plan)
    # The next layer's cache is locked while attention runs, rows before that.
    lock_seconds = prompt_plan.host_bytes / _LOCK_RATE
    return attention_seconds + shape.layers * tiles_seconds + lock_seconds


def _attention_seconds(
    shape: ModelShape,
    request: PromptRequest,
    prompt_plan: PromptPlan,
    window: int | None,
) -> float:
    """Seconds of one layer's attention, as the planner has it.

    Args:
        window: a query sees so many tokens before it; None: all.
    """
    is_resident = prompt_plan.is_on_device or request.device != GPU
    inputs: Literal["device", "host"] = "device" if is_resident else "host"
    call = plan(
        request.tokens,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=request.dtype,
        is_causal=True,
        attn_mask=None if window is None else Mask(window=(window, 0)),
        inputs=inputs,
        device=request.device,
        budget=1 << 50 if is_resident else prompt_plan.budget,
    )
    return float(call.predicted_seconds)


def _tiles_seconds(
    shape: ModelShape,
    request: PromptRequest,
    token: TokenBytes,
    prompt_plan: PromptPlan,
) -> float:
    """Seconds of everything in one layer that is computed token by token."""
    query_width = shape.heads * shape.head_dim
    key_width = shape.kv_heads * shape.head_dim
    # Queries, keys and values are computed twice: up to attention, and on the way
    # behind it.
    projections = 2 * shape.hidden * (query_width + 2 * key_width)
    projections += shape.hidden * query_width
    mlp = 3 * shape.hidden * shape.mlp_width
    operations = 2 * request.tokens * (projections + mlp)
    if request.device != GPU:
        return operations / measure_cpu(request.dtype).flops
    n_passes = _PASSES_AT_ONCE if prompt_plan.fits_at_once else _PASSES
    element_bytes = n_passes * request.tokens * token.tile
    compute_seconds = operations / _MATRIX_RATE + element_bytes / _ELEMENT_RATE
    # Each tile is launched up to attention, and again behind it.
    n_launches = 2 * ceil_div(request.tokens, prompt_plan.tile)
    compute_seconds = max(compute_seconds, n_launches * _TILE_SECONDS)
    if prompt_plan.is_on_device:
        return compute_seconds
    # Hidden states twice to the device and once back, queries, keys and values back,
    # outputs in.
    copied_bytes = request.tokens * (token.rows + 2 * token.hidden)
    copy_seconds = copied_bytes / _BUS_RATE
    # Measured: computation and copies overlap by half of the shorter time.
    hidden_seconds = min(compute_seconds, copy_seconds) / 2
    return compute_seconds + copy_seconds - hidden_seconds


def _promoted(cache: PartBytes, working: int) -> PartBytes:
    """The cache behind the prompt: some of it has moved to the device, into the memory
    that computing the prompt needed."""
    moved_bytes = min(cache.host, max(0, working - CHUNK_BYTES))
    return replace(
        cache,
        device=cache.device + moved_bytes,
        host=cache.host - moved_bytes,
    )


def _token_seconds(
    shape: ModelShape, request: PromptRequest, weights: PartBytes, cache: PartBytes
) -> float:
    """Seconds of a token after the prompt."""
    device_bytes = weights.device + cache.device
    file_seconds = cache.file / _DISK_RATE
    if request.device != GPU:
        return device_bytes / measure_cpu(request.dtype).weight_bytes + file_seconds
    launch_seconds = shape.layers * _LAYER_SECONDS
    device_seconds = max(device_bytes / _DEVICE_RATE, launch_seconds)
    n_host_layers = _layers_in_host_memory(shape, cache)
    host_seconds = device_seconds + n_host_layers * _HOST_LAYER_SECONDS
    bus_seconds = (cache.host + weights.host) / _BUS_RATE
    alone_seconds = max(host_seconds, bus_seconds)
    if cache.host == 0:
        return alone_seconds + file_seconds
    # Launches wait for the cores.
    host_seconds += n_host_layers * _CORES_BEGIN_SECONDS
    shared_seconds = _shared_seconds(host_seconds, bus_seconds, cache.host)
    return min(alone_seconds, shared_seconds) + file_seconds


def _shared_seconds(host_seconds: float, bus_seconds: float, n_bytes: int) -> float:
    """Seconds of a token if the cores take that part of a cache with which they and the
    bus end together.

    Args:
        host_seconds: what the host does beside that.
        bus_seconds: what the bus would take for everything.
        n_bytes: of the cache in host memory.
    """
    rate = 1 / _BUS_RATE + 1 / _CORES_BESIDE_BUS_RATE
    by_cores = (bus_seconds - host_seconds) / rate
    by_cores = min(max(0.0, by_cores), n_bytes)
    with_cores = host_seconds + by_cores / _CORES_BESIDE_BUS_RATE
    return max(with_cores, bus_seconds - by_cores / _BUS_RATE)


def _layers_in_host_memory(shape: ModelShape, cache: PartBytes) -> float:
    """How many layers of a cache lie in host memory."""
    n_bytes = cache.device + cache.host + cache.file
    return shape.layers * cache.host / max(1, n_bytes)


def _advice(placed: _PromptParts, request: PromptRequest) -> str:
    """Say what would make a prompt fit, or its tokens faster."""
    cache = placed.cache
    if placed.missing_bytes:
        n_bytes = format_bytes(placed.missing_bytes)
        place = "host memory" if request.device == GPU else "memory"
        words = f"{n_bytes} more of {place} would hold the prompt"
        if placed.missing_cache_bytes:
            words += "; files in a folder (--folder, folder=) would hold the cache"
        return words
    if cache.host + cache.file == 0:
        return "the whole cache lies on the device"
    outside = format_bytes(cache.host + cache.file)
    return f"{outside} more of the device would hold the whole cache"
