"""Try ``long_context`` on each decoder of the installed Transformers, built tiny.

    python benchmarks/decoders.py --results decoders.json
    python benchmarks/decoders.py --page newest.json oldest.json --to docs/decoders.md

Each type that ``AutoModelForCausalLM`` knows is built with random weights in a few
hundred thousand parameters, in float32. Its loss and all gradients of one step are
compared: as the model is, with ``register`` alone, with ``long_context``, and after
``undo``.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quorum_attention.units import counted

VOCABULARY = 128
TOKENS = 48
LAYERS = 2
MOST_PARAMETERS = 40_000_000
MOST_SECONDS = 180
# The largest difference of a gradient, as a share of the largest gradient of its kind.
TOLERANCE = 1e-3
# What a configuration may call its sizes, and what they become.
SIZES: dict[int, tuple[str, ...]] = {
    64: (
        "hidden_size",
        "d_model",
        "n_embd",
        "dim",
        "embed_dim",
        "intermediate_size",
        "ffn_dim",
        "d_ff",
        "n_inner",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "intermediate_size_mlp",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "shared_intermediate_size",
        "word_embed_proj_dim",
        "embedding_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "lru_width",
        "prefix_dense_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "decoder_hidden_size",
        "attention_hidden_size",
        "dense_intermediate_size",
    ),
    16: (
        "head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "v_head_dim",
        "sliding_window",
        "attention_chunk_size",
        "index_head_dim",
        "global_head_dim",
        "mamba_d_state",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "state_size",
        "attention_window_size",
        "hidden_size_per_layer_input",
        "time_step_rank",
        "mamba_d_head",
        "mamba_head_dim",
        "swa_head_dim",
        "o_lora_rank",
    ),
    8: (
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "mamba_n_heads",
        "mamba_num_heads",
        "num_heads_m",
    ),
    4: (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "index_n_heads",
        "linear_num_value_heads",
        "swa_num_attention_heads",
        "index_topk",
        "num_routed_experts",
    ),
    2: (
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
        "encoder_layers",
        "decoder_layers",
        "num_key_value_heads",
        "num_kv_heads",
        "num_experts_per_tok",
        "moe_topk",
        "moe_k",
        "linear_num_key_heads",
        "num_global_key_value_heads",
        "swa_num_key_value_heads",
        "num_encoder_layers",
        "num_decoder_layers",
    ),
    1: (
        "n_group",
        "topk_group",
        "n_shared_experts",
        "num_shared_experts",
        "mamba_n_groups",
        "n_groups",
    ),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input", "q_vocab_size"),
    256: ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
}
VALUE_OF = {name: value for value, names in SIZES.items() for name in names}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LINEAR_EXPERTS: dict[str, Any] = {
    "num_expert_group": 1,
    "num_experts_per_token": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "qk_head_dim": 16,
}
_INDEXED: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 256,
}
# What some configurations leave open, or name in their own way.
OF_KIND: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_LINEAR_EXPERTS},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "decoder_config": {"hidden_size_global": 64},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4}
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_chunk_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 8},
    "kimi_linear": {**_LINEAR_EXPERTS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "chunk_size": 16},
    "musicgen": {"is_decoder": True},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [6, 8],
        "axial_pos_embds_dim": [16, 48],
        "attention_head_size": 16,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xlm": {"emb_dim": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "adapter_rank": 8,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
# Why a type is not built.
NOT_BUILT = {
    "dots3_note": "the sizes of its parts for text, pictures and sound are checked "
    "against each other, and no small ones pass",
    "gemma3n": "needs the package timm; `gemma3n_text` is built",
    "gemma4_assistant": "reads keys and values of another model, and has no loss",
    "gemma4_unified_assistant": "the same",
    "git": "has no loss of a text without a picture",
    "musicgen": "its labels are four rows of sound codes, not a text's",
    "musicgen_melody": "the same",
}
# Sizes that do not suit every model: tried one after the other.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"head_dim": None, "num_key_value_heads": 4},
    {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4},
)


def tiny_fields(fields: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that make it small."""
    changed = dict[str, Any]()
    n_before = next((fields[name] for name in LAYER_COUNTS if name in fields), None)
    for name, value in fields.items():
        if name in VALUE_OF and isinstance(value, int) and not isinstance(value, bool):
            changed[name] = variant.get(name, VALUE_OF[name])
        elif name in variant and name in fields:
            changed[name] = variant[name]
        elif "dropout" in name or name.endswith("_pdrop") or "jitter" in name:
            if isinstance(value, float):
                changed[name] = 0.0
        elif name == "per_layer_config":
            changed[name] = {}
        elif isinstance(value, list) and n_before and len(value) == n_before:
            n_layers = variant.get("num_hidden_layers", LAYERS)
            changed[name] = _varied(value, n_layers)
        elif name.endswith("_token_id") and isinstance(value, int):
            changed[name] = 0 if value >= VOCABULARY else value
        elif isinstance(value, dict) and name.endswith("_config"):
            changed[name] = {**value, **tiny_fields(value, variant)}
    return changed


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with changes; those of inner configurations are merged too."""
    result = dict(fields)
    for name, value in changes.items():
        before = fields.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            result[name] = merged(before, value)
        else:
            result[name] = value
    return result


def _varied(values: list[Any], n_layers: int) -> list[Any]:
    """Return so many values, with as many kinds of them as there is room for."""
    kinds = list(dict.fromkeys(map(str, values)))[:n_layers]
    chosen = [next(value for value in values if str(value) == kind) for kind in kinds]
    return (chosen * n_layers)[:n_layers]


def tiny_model(kind: str, **named: Any) -> Any:
    """Build a tiny model of a type.

    Raises:
        Exception: no variant of sizes suits it; the first one's error.
    """
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    fields = config_class().to_dict()
    first: Exception | None = None
    for variant in VARIANTS:
        try:
            sizes = merged(tiny_fields(fields, variant), OF_KIND.get(kind, {}))
            config = config_class(**sizes)
            config.use_cache = False
            auto = transformers.AutoModelForCausalLM
            with torch.device("meta"):
                n_parameters = auto.from_config(config).num_parameters()
            if n_parameters > MOST_PARAMETERS:
                raise ValueError(f"{n_parameters:,} parameters")
            torch.manual_seed(0)
            model = auto.from_config(config, **named).float().train()
            step_of(copy.deepcopy(model))
            return model
        except Exception as error:  # tried again in other sizes
            first = first or error
    assert first is not None
    raise first


def step_of(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step, and the gradients by name."""
    ids = torch.randint(
        1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return loss.item(), gradients


def difference(
    step: tuple[float, dict[str, torch.Tensor]],
    expected: tuple[float, dict[str, torch.Tensor]],
) -> float:
    """Return the largest difference of loss and gradients, as a share of the largest
    number; infinity if other weights have gradients."""
    loss, gradients = step
    expected_loss, expected_gradients = expected
    if gradients.keys() != expected_gradients.keys():
        return float("inf")
    largest = max(
        (float(g.abs().max()) for g in expected_gradients.values()), default=0.0
    )
    worst = abs(loss - expected_loss) / max(abs(expected_loss), 1e-9)
    for name, gradient in gradients.items():
        apart = float((gradient - expected_gradients[name]).abs().max())
        worst = max(worst, apart / max(largest, 1e-9))
    return worst


def verdict(run: Callable[[], float]) -> str:
    """Return "right", or how a step is wrong, or the error that refuses it."""
    try:
        worst = run()
    except Exception as error:  # shown in the table
        return f"refused: {type(error).__name__}: {first_line(error)}"
    return "right" if worst <= TOLERANCE else f"wrong by {worst:.1e}"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def try_kind(kind: str) -> dict[str, Any]:
    """Return what happened to a tiny model of a type."""
    from quorum_attention.integrations.transformers import register
    from quorum_attention.recipes import long_context

    row: dict[str, Any] = {"kind": kind}
    try:
        model = tiny_model(kind)
        # Copies take the steps: some models carry a state on.
        expected = step_of(copy.deepcopy(model))
        again = difference(step_of(copy.deepcopy(model)), expected)
    except Exception as error:  # shown in the table
        return row | {"built": f"{type(error).__name__}: {first_line(error)}"}
    if again > TOLERANCE:
        return row | {"built": f"two equal steps differ by {again:.1e}"}
    row["built"] = "yes"
    register(min_tokens=0)

    def registered() -> float:
        attended = copy.deepcopy(model)
        attended.set_attn_implementation("quorum")
        return difference(step_of(attended), expected)

    row["register"] = verdict(registered)
    changed = copy.deepcopy(model)
    summary = long_context(changed)
    row["changes"] = {change.name: change.done for change in summary.changes}
    row["reasons"] = {
        change.name: change.how for change in summary.changes if not change.done
    }
    row["long_context"] = verdict(lambda: difference(step_of(changed), expected))
    summary.undo()
    row["undo"] = verdict(lambda: difference(step_of(changed), expected))
    return row


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def try_all(only: list[str], path: Path) -> None:
    """Try all types, or some, and write the results after each."""
    import transformers
    from transformers.models.auto import modeling_auto

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kinds = only or sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        try:
            with time_limit(MOST_SECONDS):
                rows.append(try_kind(kind))
        except Exception as error:  # a fault of this package: shown in the table
            rows.append(
                {
                    "kind": kind,
                    "built": "yes",
                    "long_context": f"failed: {first_line(error)}",
                }
            )
        last = rows[-1]
        print(
            kind,
            last["built"],
            last.get("register"),
            last.get("long_context"),
            flush=True,
        )
        versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


NAMES = ("quorum attention", "chunked loss", "tiled MLP", "fused norms", "checkpoints")
NOT_BY_NAME = "does not take its attention by name"
_MODEL_CLASS = re.compile(r"^\w+(ForCausalLM|LMHeadModel|ModelWithLMHead) ")


def built(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of models that were built."""
    return [row for row in results["rows"] if row["built"] == "yes"]


def summary_of(results: list[dict[str, Any]]) -> list[str]:
    """Return the table of counts, with a column for each version."""
    versions = [result["versions"]["transformers"] for result in results]
    columns = [list(counts_of(built(result)).values()) for result in results]
    lines = [
        f"| Transformers | {' | '.join(versions)} |",
        "|---" * (1 + len(results)) + "|",
    ]
    for number, name in enumerate(counts_of([])):
        cells = [str(column[number]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many models there are of each kind."""
    right = [row for row in rows if row["long_context"] == "right"]
    counts = {
        "decoders that were built": len(rows),
        "`long_context`: right": len(right),
        "`long_context`: wrong": len(rows) - len(right),
        "after `undo`: right": sum(row["undo"] == "right" for row in rows),
        "`register` alone: right": sum(register_cell(row) == "right" for row in rows),
        "`register` alone: the model does not take its attention by name, so nothing "
        "changes": sum(register_cell(row) == "-" for row in rows),
    }
    for name in NAMES:
        counts[f"{name}: made"] = sum(row["changes"][name] for row in rows)
    return counts


def register_cell(row: dict[str, Any]) -> str:
    """Return "right", "-" where the name is not used, or the error."""
    if NOT_BY_NAME in row["reasons"].get("quorum attention", ""):
        return "-"
    cell: str = row["register"]
    return cell


def page(results: list[dict[str, Any]]) -> str:
    """Return the page of the results: counts of all versions, and the first in full."""
    newest = results[0]
    rows = built(newest)
    reasons: dict[str, int] = {}
    lines = [
        "# Decoders of Transformers",
        "",
        "`benchmarks/decoders.py` builds each type of `AutoModelForCausalLM` in a "
        "small size, with random weights. It compares loss and all",
        "gradients of one step, in float32 on a CPU, in four states: the unchanged "
        "model, with `register` alone, with `long_context`, and after `undo`.",
        "torch has a kernel for RMS norms only on GPUs, so fused norms were left out "
        "everywhere here.",
        "",
        *summary_of(results),
        "",
        f"## Each model of {newest['versions']['transformers']}",
        "",
        '"right" and "yes" mean that the change was made, and results are right. '
        "A number is the reason why it was left out; the reasons are below",
        'the table. "-" means that the model does not take its attention by name.',
        "",
        f"| model | `register` | {' | '.join(NAMES)} |",
        "|---" * (2 + len(NAMES)) + "|",
    ]
    for row in rows:
        registered = register_cell(row)
        if registered not in ("right", "-"):
            registered = numbered(registered, reasons)
        cells = [changed_cell(row, name, reasons) for name in NAMES]
        lines.append(f"| {' | '.join((row['kind'], registered, *cells))} |")
    lines += ["", "## Reasons", "", "| number | reason |", "|---|---|"]
    for reason, number in reasons.items():
        escaped = reason.replace("|", "\\|")
        lines.append(f"| {number} | {escaped} |")
    others = [row["kind"] for row in newest["rows"] if row["built"] != "yes"]
    lines += [
        "",
        "## Not built",
        "",
        f"{counted(len(others), 'type')} did not build in small sizes.",
        "",
        "| model | why |",
        "|---|---|",
        *(f"| {kind} | {NOT_BUILT.get(kind, 'not known')} |" for kind in others),
        "",
    ]
    return "\n".join(lines)


def changed_cell(row: dict[str, Any], name: str, reasons: dict[str, int]) -> str:
    """Return "yes", or the number of the reason why a change was left out."""
    if row["changes"][name]:
        return "yes"
    return numbered(row["reasons"][name], reasons)


def numbered(reason: str, reasons: dict[str, int]) -> str:
    """Return the number of a reason, without the class of the model that it names."""
    text = _MODEL_CLASS.sub("the model ", reason)
    return str(reasons.setdefault(text, len(reasons) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="write results here")
    parser.add_argument(
        "--page", type=Path, nargs="+", help="read results from here, the newest first"
    )
    parser.add_argument("--to", type=Path, help="write the page here")
    parser.add_argument("kinds", nargs="*", help="types of models; default all")
    options = parser.parse_args()
    if options.results:
        try_all(options.kinds, options.results)
    if options.page:
        results = [json.loads(path.read_text()) for path in options.page]
        options.to.write_text(page(results))


if __name__ == "__main__":
    main()
