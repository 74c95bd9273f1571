"""One row of ``run.py prompt``: reads what to measure from its argument, and prints JSON."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from measure import wait
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from quorum_attention.recipes import long_context, long_prompt

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    # hidden, MLP, layers, heads, head_dim
    "small": (64, 128, 2, 4, 16),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 128),
    "Qwen3-4B": (2560, 9728, 36, 32, 128),
    "Qwen3-8B": (4096, 12288, 36, 32, 128),
}
CHUNK = 4096


def new_model(shape: str, layers: int | None, device: str) -> Any:
    """A model with random weights, on a device."""
    hidden, mlp, n_layers, heads, head_dim = SHAPES[shape]
    is_small = shape == "small"
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers or n_layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if is_small else 8,
        head_dim=head_dim,
        vocab_size=512 if is_small else 151_936,
        max_position_embeddings=1 << 21,
        tie_word_embeddings=shape != "Qwen3-8B",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype=torch.float32 if is_small else torch.bfloat16,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


class HostHeads(DynamicLayer):
    """Keys and values of a layer in page-locked host memory, in one piece."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0

    def update(self, key: Any, value: Any, *args: Any, **named: Any) -> Any:
        """Append, and return all that there is in host memory."""
        if self._length == 0:
            self.keys = self._allocate(key)
            self.values = self._allocate(value)
            self.is_initialized = True
        start = self._length
        self._length = start + key.shape[2]
        keys = self.keys[:, :, : self._length]
        values = self.values[:, :, : self._length]
        _copy_by_heads(keys[:, :, start:], key)
        _copy_by_heads(values[:, :, start:], value)
        return keys, values

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        """Memory for all tokens of ``rows``, page-locked beside a GPU."""
        batch, heads, _, width = rows.shape
        shape = (batch, heads, self._capacity, width)
        return torch.empty(shape, dtype=rows.dtype, pin_memory=rows.is_cuda)

    def get_seq_length(self) -> int:
        """Tokens."""
        return self._length


def _copy_by_heads(memory: torch.Tensor, rows: torch.Tensor) -> None:
    for head in range(rows.shape[1]):
        memory[:, head].copy_(rows[:, head])


def attend_by_heads(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any
) -> tuple[Any, None]:
    """Attention of one key/value head at a time, whose keys and values come from host memory."""
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    past = key.shape[2] - query.shape[2]
    causal = None
    if query.shape[2] > 1:
        from torch.nn.attention.bias import causal_lower_right

        causal = causal_lower_right(query.shape[2], past + query.shape[2])
    for number in range(key.shape[1]):
        heads = slice(number * group, (number + 1) * group)
        k, v = (
            t[:, number : number + 1].to(query.device).expand(-1, group, -1, -1)
            for t in (key, value)
        )
        out[:, heads] = torch.nn.functional.scaled_dot_product_attention(
            query[:, heads], k, v, attn_mask=causal, scale=scaling
        )
    return out.transpose(1, 2).contiguous(), None


def prepared(model: Any, row: dict[str, Any], device: str) -> tuple[Any, int]:
    """The cache of a way, and the tokens of a chunk of the prompt."""
    way = row["way"]
    n_tokens = row["tokens"]
    if way == "sdpa":
        return DynamicCache(config=model.config), n_tokens
    if way == "offloaded":
        return DynamicCache(config=model.config, offloading=device == "cuda"), n_tokens
    if way == "chunks":
        return DynamicCache(config=model.config, offloading=device == "cuda"), CHUNK
    if way == "heads":
        transformers.AttentionInterface.register("by_heads", attend_by_heads)
        transformers.masking_utils.AttentionMaskInterface.register("by_heads", lambda **_: None)
        model.set_attn_implementation("by_heads")
        capacity = n_tokens + row["generate"]
        layers = [HostHeads(capacity) for _ in range(model.config.num_hidden_layers)]
        return transformers.Cache(layers=layers), CHUNK
    if way == "long_context":
        long_context(model, checkpoints=None)
        return DynamicCache(config=model.config, offloading=device == "cuda"), n_tokens
    memory = row["memory"] if device == "cuda" else None
    cache = long_prompt(model, device_memory=memory, weights=row["weights"], progress=False)
    return cache, n_tokens


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Prefill a prompt, and generate some tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, row["memory"] / total))
    torch.manual_seed(0)
    begins_on = "cpu" if row["weights"] == "host" else device
    model = new_model(row["shape"], row["layers"], begins_on)
    cache, chunk = prepared(model, row, device)
    gc.collect()
    weights = sum(weight.nbytes for weight in model.parameters() if weight.device.type == device)
    ids = torch.randint(0, model.config.vocab_size, (1, row["tokens"]), device=device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        warm_up(model, device)
        wait()
        began = time.perf_counter()
        for part in ids.split(chunk, 1):
            output = model(part, past_key_values=cache, logits_to_keep=1, use_cache=True)
        next_ids = output.logits.argmax(-1)
        wait()
        prefill = time.perf_counter() - began
        seconds = []
        for _ in range(row["generate"]):
            began = time.perf_counter()
            output = model(next_ids, past_key_values=cache, use_cache=True)
            next_ids = output.logits[:, -1:].argmax(-1)
            wait()
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "prefill_seconds": prefill,
        "token_seconds": statistics.median(seconds),
        "first_token_seconds": seconds[0],
        "peak_bytes": peak,
        "weights_bytes": weights,
        "cache": str(cache)[:500],
    }


def warm_up(model: Any, device: str) -> None:
    """Load kernels with a few tokens."""
    ids = torch.zeros((1, 16), dtype=torch.int64, device=device)
    model(ids, use_cache=False)


if __name__ == "__main__":
    # Attention by another library may print: the last line is ours.
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
