"""Trainers of Transformers and TRL take a changed model, and train it as they train a
plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")
pytest.importorskip("trl")

import datasets
import peft
import trl
from helpers.models import VOCABULARY, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import quorum_attention as qa
from quorum_attention.integrations.transformers import register
from quorum_attention.recipes import long_context

SIZES = {"num_hidden_layers": 3, "hidden_size": 64}
LENGTHS = [30, 17, 40, 25, 33, 9, 28, 22]
# What all trainers of these tests are told.
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "per_device_train_batch_size": 2,
}


@pytest.fixture(autouse=True)
def _without_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers."""
    words = {str(number): number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="0", eos_token="1", unk_token="0"
    )


def words(n_words: int) -> str:
    """A text of random words."""
    numbers = torch.randint(2, VOCABULARY, (n_words,)).tolist()
    return " ".join(map(str, numbers))


def adapters(task: str = "CAUSAL_LM") -> Any:
    """Adapters of two layers of each block."""
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)


class EightBits(torch.nn.Linear):
    """A stand-in for a quantised layer: its weights are integers, with a scale for each
    row. It has no gradients of its own."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        integers = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(integers, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        return torch.nn.functional.linear(x, weight)


def quantised(model: Any) -> Any:
    """The model with ``EightBits`` in all linear layers of its decoder."""
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, EightBits(child))
    return model


def mean_of_predictions(results: Any) -> dict[str, float]:
    """A metric that depends on all that a trainer gathers."""
    predictions = results.predictions
    if isinstance(predictions, tuple):
        predictions = predictions[0]
    return {"mean": float(predictions.mean())}


def trainer_of_transformers(model: Any, folder: Path) -> Any:
    """``Trainer`` with labels; it evaluates with metrics of the logits, and saves."""
    ids = [torch.randint(2, VOCABULARY, (60,)) for _ in LENGTHS]
    data = [{"input_ids": text, "labels": text} for text in ids]
    arguments = TrainingArguments(
        str(folder), **COMMON, eval_strategy="steps", eval_steps=1, save_steps=2
    )
    return Trainer(
        model,
        arguments,
        train_dataset=data,  # type: ignore[arg-type]
        eval_dataset=data,  # type: ignore[arg-type]
        compute_metrics=mean_of_predictions,
    )


def supervised(model: Any, folder: Path, **options: Any) -> Any:
    """``SFTTrainer``, with padded, packed or concatenated texts."""
    with_adapters = options.pop("adapters", False)
    ids = [torch.randint(2, VOCABULARY, (length,)).tolist() for length in LENGTHS]
    texts = datasets.Dataset.from_list([{"input_ids": text} for text in ids])
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(str(folder), **{**COMMON, **options}),
        train_dataset=texts,
        eval_dataset=texts if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        peft_config=adapters() if with_adapters else None,
    )


def preferences() -> Any:
    """Prompts, each with a better and a worse answer."""
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(length),
                "chosen": " " + words(9),
                "rejected": " " + words(7),
            }
            for length in LENGTHS
        ]
    )


def preferring(model: Any, folder: Path, **options: Any) -> Any:
    """``DPOTrainer``, whose reference is the model without adapters, or a copy of
    it."""
    with_adapters = options.pop("adapters", False)
    pairs = preferences()
    return trl.DPOTrainer(
        model,
        args=trl.DPOConfig(str(folder), **COMMON, **options),
        train_dataset=pairs,
        eval_dataset=pairs if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        ref_model=None if with_adapters else copy.deepcopy(model),
        peft_config=adapters() if with_adapters else None,
    )


def _share_of_even_words(completions: list[str], **_: Any) -> list[float]:
    """The reward of ``GRPOTrainer``."""
    numbers = [list(map(int, text.split())) for text in completions]
    return [sum(n % 2 == 0 for n in text) / max(1, len(text)) for text in numbers]


def reinforced(model: Any, folder: Path, **options: Any) -> Any:
    """``GRPOTrainer``, which generates answers and computes the logits of some
    tokens."""
    with_adapters = options.pop("adapters", False)
    texts = [{"prompt": words(length)} for length in LENGTHS]
    prompts = datasets.Dataset.from_list(texts)
    arguments = trl.GRPOConfig(
        str(folder), **COMMON, num_generations=2, max_completion_length=8, **options
    )
    return trl.GRPOTrainer(
        model,
        reward_funcs=_share_of_even_words,
        args=arguments,
        train_dataset=prompts,
        eval_dataset=prompts if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        peft_config=adapters() if with_adapters else None,
    )


TRAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "Trainer": trainer_of_transformers,
    "SFT padded": supervised,
    "SFT packed": lambda model, folder: supervised(
        model, folder, packing=True, max_length=64, per_device_train_batch_size=1
    ),
    "SFT without padding": lambda model, folder: supervised(
        model, folder, padding_free=True, max_length=None
    ),
    "SFT packed, with adapters": lambda model, folder: supervised(
        model, folder, packing=True, max_length=64, loss_type="nll", adapters=True
    ),
    "DPO": preferring,
    "DPO with adapters": lambda model, folder: preferring(model, folder, adapters=True),
    "GRPO": reinforced,
}


def losses_and_weights(
    trainer: Any,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train: what was logged of each step, and the weights at the end."""
    trainer.train()
    names = ("loss", "eval_loss", "eval_mean", "reward", "rewards/margins")
    logs = [
        {name: log[name] for name in names if name in log}
        for log in trainer.state.log_history
    ]
    weights = {
        name: weight.detach() for name, weight in trainer.model.named_parameters()
    }
    return logs, weights


def assert_same_training(
    make: Callable[[Any, Path], Any], base: Any, folder: Path, **options: Any
) -> None:
    """Train a plain and a changed copy of a model."""
    runs = []
    for is_changed in (False, True):
        model = copy.deepcopy(base)
        model.set_attn_implementation("sdpa")
        if is_changed:
            summary = long_context(model, budget="64MiB", mlp_tile=16, **options)
            assert "quorum attention" in summary.done
        torch.manual_seed(1)
        runs.append(losses_and_weights(make(model, folder / str(is_changed))))
    (plain_logs, plain_weights), (logs, weights) = runs
    assert any("loss" in log for log in plain_logs)
    assert logs == [pytest.approx(log, abs=1e-4) for log in plain_logs]
    torch.testing.assert_close(weights, plain_weights, atol=2e-5, rtol=1e-3)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", TRAINERS)
def test_a_changed_model_is_trained_as_a_plain_one(name: str, tmp_path: Path) -> None:
    """Losses, metrics, rewards and weights of three steps are those of SDPA."""
    assert_same_training(TRAINERS[name], tiny("llama", SIZES).train(), tmp_path)


def rewarding(model: Any, folder: Path, **options: Any) -> Any:
    """``RewardTrainer``, whose model gives one number to a text."""
    with_adapters = options.pop("adapters", False)
    pairs = preferences()
    return trl.RewardTrainer(
        model,
        args=trl.RewardConfig(str(folder), **COMMON, **options),
        train_dataset=pairs,
        eval_dataset=pairs if "eval_strategy" in options else None,
        processing_class=tokenizer(),
        peft_config=adapters("SEQ_CLS") if with_adapters else None,
    )


@pytest.mark.slow
def test_a_model_of_rewards(tmp_path: Path) -> None:
    """It has no logits of words, so its loss stays; the rest is changed."""
    base = tiny("llama", {**SIZES, "num_labels": 1}, AutoModelForSequenceClassification)
    assert_same_training(rewarding, base.train(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", [register, long_context])
def test_selective_checkpoints(change: Callable[..., Any], tmp_path: Path) -> None:
    """Those of TRL keep attention, by the name of its operator: it is computed once."""
    model = tiny("llama", SIZES).train()
    if change is long_context:
        long_context(model, budget="64MiB")
    else:
        model.set_attn_implementation(register("quorum_selective", budget="64MiB"))
    options = {**COMMON, "max_steps": 1, "gradient_accumulation_steps": 1}
    options["gradient_checkpointing_kwargs"] = {"selective": True}
    trainer = supervised(model, tmp_path, **options)
    report = qa.Report()
    with qa.using(report=report):
        trainer.train()
    assert report.total.forwards == SIZES["num_hidden_layers"]
    assert report.total.backwards == SIZES["num_hidden_layers"]


def with_adapters(model: Any, folder: Path) -> Any:
    """``Trainer`` of a model with adapters."""
    return trainer_of_transformers(peft.get_peft_model(model, adapters()), folder)


# Adapters, and an evaluation and a file after the second step.
FULL: dict[str, Any] = {
    "adapters": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
}
FULL_TRAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "Trainer": with_adapters,
    "SFT packed": lambda model, folder: supervised(
        model, folder, packing=True, max_length=64, **FULL
    ),
    "SFT without padding": lambda model, folder: supervised(
        model, folder, padding_free=True, max_length=None, **FULL
    ),
    "DPO": lambda model, folder: preferring(model, folder, **FULL),
    "GRPO": lambda model, folder: reinforced(model, folder, **FULL),
    "reward": lambda model, folder: rewarding(model, folder, **FULL),
}


def numbers_of(log: dict[str, Any]) -> dict[str, float]:
    """What was logged of a step, but for times, and for signs of rewards that are as
    small as roundings."""
    others = ("runtime", "per_second", "time", "rewards/accuracies")
    return {
        name: number
        for name, number in log.items()
        if isinstance(number, float) and not name.endswith(others)
    }


def full_model(name: str) -> Any:
    """A quantised model for a trainer."""
    auto = AutoModelForSequenceClassification if name == "reward" else None
    sizes = {**SIZES, "num_labels": 1} if name == "reward" else SIZES
    return quantised(tiny("llama", sizes, auto).train())


def full_run(
    name: str, folder: Path, *, is_changed: bool, start: Path | None = None
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train adapters of a quantised model: what was logged, and the adapters."""
    torch.manual_seed(0)
    model = full_model(name)
    model.set_attn_implementation("sdpa")
    if is_changed:
        summary = long_context(model, budget="64MiB", mlp_tile=16)
        assert {"quorum attention", "tiled MLP", "checkpoints"} <= set(summary.done)
    torch.manual_seed(1)
    trainer = FULL_TRAINERS[name](model, folder)
    trainer.train(resume_from_checkpoint=None if start is None else str(start))
    weights = {
        name: weight.detach()
        for name, weight in trainer.model.named_parameters()
        if weight.requires_grad
    }
    return [numbers_of(log) for log in trainer.state.log_history], weights


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_TRAINERS)
def test_adapters_of_a_quantised_model(name: str, tmp_path: Path) -> None:
    """Everything that is logged, in evaluations too, and the adapters are those of
    SDPA. A run that goes on from a file of its second step ends as one in one go."""
    plain_logs, plain_weights = full_run(name, tmp_path / "plain", is_changed=False)
    logs, weights = full_run(name, tmp_path / "changed", is_changed=True)
    assert any("eval_loss" in log for log in plain_logs)
    assert logs == [pytest.approx(log, abs=2e-4, rel=2e-3) for log in plain_logs]
    torch.testing.assert_close(weights, plain_weights, atol=2e-5, rtol=1e-3)
    start = tmp_path / "changed" / "checkpoint-2"
    _, resumed = full_run(name, tmp_path / "resumed", is_changed=True, start=start)
    torch.testing.assert_close(resumed, weights, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    """A run that goes on from a file of its second step ends as one in one go."""
    base = tiny("llama", SIZES).train()
    weights = []
    for start in (None, str(tmp_path / "0" / "checkpoint-2")):
        model = copy.deepcopy(base)
        long_context(model, budget="64MiB", mlp_tile=16)
        torch.manual_seed(1)
        trainer = trainer_of_transformers(model, tmp_path / str(len(weights)))
        trainer.train(resume_from_checkpoint=start)
        weights.append(
            {name: weight.detach() for name, weight in model.named_parameters()}
        )
    torch.testing.assert_close(weights[1], weights[0])
