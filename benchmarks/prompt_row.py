"""One row of ``run.py prompt``: reads what to measure from its argument, and prints
JSON.

It prints a line after each stage, which has the figures of the stages before too.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from measure import forget_host_peak, host_peak_bytes, wait
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from quorum_attention.recipes import long_context, long_prompt
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.prompt_estimate import PromptRequest, estimate_prompt

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    # hidden, MLP, layers, heads, head_dim
    "small": (64, 128, 2, 4, 16),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 128),
    "Qwen3-4B": (2560, 9728, 36, 32, 128),
    "Qwen3-8B": (4096, 12288, 36, 32, 128),
}
CHUNK = 4096
# A prompt of so many tokens before those that are measured: kernels are compiled and
# loaded.
WARM_UP_TOKENS = 16_384
QUESTION_TOKENS = 64
# Seconds before the end of a row's time, when it says where it is.
LAST_SECONDS = 3.0


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
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa"
        )
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
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention of one key/value head at a time, whose keys and values come from host
    memory."""
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


def change_model(model: Any, row: dict[str, Any], device: str) -> None:
    """Change a model as its way has it."""
    way = row["way"]
    if way == "heads":
        transformers.AttentionInterface.register("by_heads", attend_by_heads)
        transformers.masking_utils.AttentionMaskInterface.register(
            "by_heads", lambda **_: None
        )
        model.set_attn_implementation("by_heads")
    if way == "long_context":
        long_context(model, checkpoints=None)


def new_cache(model: Any, row: dict[str, Any], device: str) -> Any:
    """An empty cache of a way."""
    way = row["way"]
    if way == "sdpa":
        return DynamicCache(config=model.config)
    if way in ("offloaded", "chunks", "long_context"):
        return DynamicCache(config=model.config, offloading=device == "cuda")
    if way == "heads":
        capacity = row["tokens"] + row["generate"]
        layers = [HostHeads(capacity) for _ in range(model.config.num_hidden_layers)]
        return transformers.Cache(layers=layers)
    memory = row["memory"] if device == "cuda" else None
    return long_prompt(
        model,
        device_memory=memory,
        host_memory=row["host_memory"],
        folder=row["folder"],
        weights=row["weights"],
        progress=False,
    )


class Clock(transformers.StoppingCriteria):
    """Notes when each token of an answer is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Never stop."""
        wait()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def answer(
    model: Any, row: dict[str, Any], ids: torch.Tensor, cache: Any, n_tokens: int
) -> list[float]:
    """Let a model answer, as a user would; return the seconds of each token, the
    prompt's first."""
    clock = Clock()
    chunks = {"prefill_chunk_size": CHUNK} if row["way"] in ("chunks", "heads") else {}
    wait()
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=n_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=-1,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
        **chunks,
    )
    starts = [began, *clock.times]
    return [end - start for start, end in zip(starts, clock.times, strict=False)]


def begin(row: dict[str, Any], device: str) -> Any:
    """A model with random weights where the way wants them, changed; the device's
    memory is limited from here on."""
    torch.manual_seed(0)
    model = new_model(row["shape"], row["layers"], device)
    if row["weights"] == "host":
        # Random numbers are made on the device, which is quick.
        model = model.cpu()
    free_memory(device)
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, row["memory"] / total))
    change_model(model, row, device)
    return model


def free_memory(device: str) -> None:
    """Give back what nobody uses, and forget the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_ids(model: Any, batch: int, n_tokens: int, device: str) -> torch.Tensor:
    """(batch, n_tokens) tokens."""
    return torch.randint(0, model.config.vocab_size, (batch, n_tokens), device=device)


def measure(row: dict[str, Any]) -> None:
    """Print the figures of a row, stage by stage."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = begin(row, device)
    result: dict[str, Any] = {}
    if row["way"] == "ours":
        show(result | {"estimated": estimated(model, row, device)}, result)
    n_warm_up = min(row["tokens"], WARM_UP_TOKENS)
    seconds = answer(
        model,
        row,
        random_ids(model, 1, n_warm_up, device),
        new_cache(model, row, device),
        3,
    )
    show({"warm_up_seconds": seconds}, result)
    free_memory(device)
    weights = sum(
        weight.nbytes for weight in model.parameters() if weight.device.type == device
    )
    ids = random_ids(model, 1, row["tokens"], device)
    runs = []
    forget_host_peak()
    for _ in range(row["repeats"]):
        cache = None
        free_memory(device)
        cache = new_cache(model, row, device)
        runs.append(answer(model, row, ids, cache, 1 + row["generate"]))
    show(
        {
            "prefill_seconds": statistics.median(run[0] for run in runs),
            "token_seconds": statistics.median(
                step for run in runs for step in run[1:]
            ),
            "first_token_seconds": runs[-1][1],
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            "host_peak_bytes": host_peak_bytes(),
            "weights_bytes": weights,
            "cache": str(cache)[:500],
        },
        result,
    )
    if row["questions"]:
        cache.crop(row["tokens"])
        show(ask(model, row, ids, cache, device), result)


def show(figures: dict[str, Any], result: dict[str, Any]) -> None:
    """Print the figures of a stage behind those of the stages before."""
    result.update(figures)
    # Attention by another library may print: the last line is ours.
    print(json.dumps(result), flush=True)


def ask(
    model: Any, row: dict[str, Any], ids: torch.Tensor, cache: Any, device: str
) -> dict[str, Any]:
    """Seconds of questions about a prompt that is in the cache: one after the other,
    and as a batch.
    """
    n_questions = row["questions"]
    questions = random_ids(model, n_questions, QUESTION_TOKENS, device)
    n_answer = row["generate"]
    singles = []
    for question in questions:
        prompt = torch.cat([ids, question[None]], 1)
        singles.append(sum(answer(model, row, prompt, cache.fork(), n_answer)))
    batch = cache.fork()
    batch.batch_repeat_interleave(n_questions)
    prompts = torch.cat([ids.expand(n_questions, -1), questions], 1)
    steps = answer(model, row, prompts, batch, n_answer)
    return {
        "question_seconds": singles,
        "batch_seconds": sum(steps),
        "batch_token_seconds": statistics.median(steps[1:]),
    }


def estimated(model: Any, row: dict[str, Any], device: str) -> dict[str, Any]:
    """The estimate of a row, as ``quorum-attention estimate`` makes it."""
    parameters = sum(weight.numel() for weight in model.parameters())
    shape = read_shape(model.config.to_dict(), parameters)
    request = PromptRequest(
        tokens=row["tokens"],
        generate=row["generate"],
        device_memory=row["memory"],
        has_folder=row["folder"] is not None,
        weights=row["weights"],
        dtype=model.dtype,
        device=device,
    )
    estimate = estimate_prompt(shape, request)
    return {
        "prefill_seconds": estimate.prefill_seconds,
        "token_seconds": estimate.token_seconds,
        "device_bytes": estimate.total("device"),
        "host_bytes": estimate.total("host"),
    }


def main(arguments: Sequence[str]) -> None:
    """Measure the row that the first argument describes. Too late, say where it is, and
    end."""
    row = json.loads(arguments[0])
    faulthandler.dump_traceback_later(
        max(1.0, row["timeout"] - LAST_SECONDS), exit=True
    )
    measure(row)


if __name__ == "__main__":
    main(sys.argv[1:])
