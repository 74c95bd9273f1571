"""The loss in chunks has the model's value and gradients whatever its output layer
becomes; logits are there for whoever reads them; and where it cannot hold, a warning
says so."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from helpers.models import VOCABULARY, tiny

from quorum_attention.recipes import deferred_logits, long_context
from quorum_attention.recipes.deferred_logits import DeferredLogits

IDS = torch.arange(120).reshape(2, 60) * 7 % VOCABULARY
CHUNK = 16  # tokens; there are 120


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few tokens; and logits of one text and more are many."""
    monkeypatch.setattr("quorum_attention.recipes.step_estimate.LOSS_BYTES", 1)
    monkeypatch.setattr(deferred_logits, "_WARNED_BYTES", 59 * VOCABULARY * 4)
    monkeypatch.setattr(deferred_logits, "_warned", set())


def changed_copy(model: Any) -> Any:
    changed = copy.deepcopy(model)
    summary = long_context(changed, checkpoints=None, attention=False, mlp_tile=None)
    assert "chunked loss" in summary.done, summary
    return changed


def assert_same_step(plain: Any, changed: Any, **asked: Any) -> Any:
    """The losses and all gradients are the same. Returns what the changed model
    returned."""
    asked = {"input_ids": IDS, "labels": IDS, **asked}
    outputs = [model(**asked) for model in (plain, changed)]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    for output in outputs:
        output.loss.backward()
    pairs = zip(plain.named_parameters(), changed.named_parameters(), strict=True)
    for (name, own), (_, ours) in pairs:
        assert (own.grad is None) == (ours.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(ours.grad, own.grad, atol=1e-6, rtol=1e-4)
    return outputs[1]


class Adapted(torch.nn.Module):
    """As a low-rank adapter of PEFT around the output layer; and it counts the tokens
    of a call."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = head
        self.down = torch.nn.Linear(head.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, head.out_features, bias=False)
        self.tokens: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens.append(x.numel() // x.shape[-1])
        adapted: torch.Tensor = self.base_layer(x) + self.up(self.down(x))
        return adapted


class TrainedTokens(torch.nn.Module):
    """As PEFT's trained tokens on an output layer tied to the embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_layer = model.get_output_embeddings()
        self.rows = torch.nn.Parameter(torch.randn(3, model.config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.tensor([1, 5, 9])
        weight = self.base_layer.weight.index_copy(0, at, self.rows)
        return torch.nn.functional.linear(x, weight)


def adapt(model: Any) -> None:
    model.lm_head = Adapted(model.lm_head)


def resize(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 24, mean_resizing=False)


def train_tokens(model: Any) -> None:
    model.lm_head = TrainedTokens(model)


def doubled(head: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = 2 * type(head).forward(head, x)
    return logits


def replace_forward(model: Any) -> None:
    """As Accelerate's ``device_map``."""
    model.lm_head.forward = MethodType(doubled, model.lm_head)


HEADS: dict[str, Callable[[Any], None]] = {
    "resized embeddings": resize,
    "another layer": lambda model: model.set_output_embeddings(
        torch.nn.Linear(32, VOCABULARY)
    ),
    "an adapter": adapt,
    "trained tokens": train_tokens,
    "another forward": replace_forward,
    "a normed weight": lambda model: torch.nn.utils.parametrizations.weight_norm(
        model.lm_head
    ),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_output_layer_of_the_call_is_in_chunks(head: str, before: bool) -> None:
    """What came after ``long_context`` was computed as a whole, or crashed."""
    plain = tiny("llama", {"tie_word_embeddings": head == "trained tokens"}).train()
    changed = plain if before else changed_copy(plain)
    for model in (plain,) if before else (plain, changed):
        torch.manual_seed(0)
        HEADS[head](model)
    if before:
        changed = changed_copy(plain)
    logits = assert_same_step(plain, changed).logits
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed


def test_a_chunk_has_few_tokens() -> None:
    changed = changed_copy(tiny("llama").train())
    adapt(changed)
    changed(IDS, labels=IDS).loss.backward()
    assert max(changed.lm_head.tokens) == CHUNK
    assert (
        sum(changed.lm_head.tokens) > 2 * IDS.numel()
    )  # forward, and again in the backward


def test_an_output_layer_of_another_class_after_a_call() -> None:
    """A parametrization makes a subclass of the layer's class, which was changed
    before."""
    plain = tiny("llama").train()
    changed = changed_copy(plain)
    changed(IDS, labels=IDS)
    for model in (plain, changed):
        torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    assert not assert_same_step(plain, changed).logits.is_computed


@pytest.mark.parametrize("kind", ["lora", "trained tokens", "saved modules"])
@pytest.mark.parametrize("before", [False, True])
def test_adapters_of_peft(kind: str, before: bool) -> None:
    peft = pytest.importorskip("peft")
    config = {
        "lora": lambda: peft.LoraConfig(target_modules=["lm_head", "q_proj"]),
        "trained tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 5, 9]),
        "saved modules": lambda: peft.LoraConfig(
            target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        ),
    }[kind]
    plain = tiny("llama", {"tie_word_embeddings": kind == "trained tokens"}).train()
    changed = plain if before else changed_copy(plain)
    plain = peft.get_peft_model(copy.deepcopy(plain), config())
    changed = peft.get_peft_model(changed, config())
    if before:
        long_context(changed, checkpoints=None, attention=False, mlp_tile=None)
    changed.load_state_dict(plain.state_dict())
    logits = assert_same_step(plain, changed).logits
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed


class Mixing(torch.nn.Linear):
    """An output layer in which tokens meet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


def test_an_output_layer_in_which_tokens_meet_runs_as_a_whole() -> None:
    plain = tiny("llama").train()
    changed = changed_copy(plain)
    for model in (plain, changed):
        torch.manual_seed(0)
        model.set_output_embeddings(Mixing(32, VOCABULARY))
    with pytest.warns(UserWarning, match="Mixing, does not take tokens one by one"):
        assert_same_step(plain, changed)


def centred(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(1, keepdim=True)


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_sees_all_logits_and_that_is_said_once(inside: bool) -> None:
    """It may do anything to them, as this one, in which tokens meet."""
    plain = tiny("llama").train()
    changed = changed_copy(plain)
    for model in (plain, changed):
        if inside:
            torch.manual_seed(0)
            adapt(model)
        head = model.lm_head
        (head.base_layer if inside else head).register_forward_hook(centred)
    with pytest.warns(UserWarning, match="the output layer, .*, has hooks"):
        assert_same_step(plain, changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(plain, changed)


def test_a_loss_outside_of_the_model_is_warned_of_once() -> None:
    """As label smoothing: a trainer keeps the labels to itself."""
    changed = changed_copy(tiny("llama").train())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed.eval()(IDS)
        with torch.no_grad():
            changed.train()(IDS)
        changed(IDS[:, :9])  # few logits
    with pytest.warns(UserWarning, match="without labels"):
        changed(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed(IDS)


def test_another_loss_is_warned_of() -> None:
    plain = tiny("llama").train()
    changed = changed_copy(plain)
    for model in (plain, changed):
        model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with pytest.warns(UserWarning, match="another loss"):
        assert_same_step(plain, changed)


@pytest.mark.parametrize("after", [False, True])
def test_a_model_that_reads_its_logits_in_training(after: bool) -> None:
    """Before its loss and after it. A trial in evaluation does not see that."""

    def forward(self: Any, input_ids: Any, labels: Any = None, **more: Any) -> Any:
        hidden = self.model(input_ids, **more).last_hidden_state
        logits = self.lm_head(hidden) / 2
        penalty = (
            logits.logsumexp(-1).square().mean() if self.training and not after else 0.0
        )
        loss = self.loss_function(logits, labels, self.vocab_size) + penalty
        if self.training and after:
            loss = loss + torch.logsumexp(logits, -1).square().mean()
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            loss=loss, logits=logits
        )

    import transformers

    plain = tiny("llama").train()
    plain.__class__ = type("Penalised", (type(plain),), {"forward": forward})
    changed = changed_copy(plain)
    with pytest.warns(UserWarning, match="logits are computed at once"):
        assert_same_step(plain, changed)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad]
)
@pytest.mark.parametrize("cast", [False, True])
def test_logits_are_read_after_the_call(mode: Any, cast: bool) -> None:
    """In the modes of the call: they are those of the model, and so is what their
    reading costs."""
    plain = tiny("gemma2", {"final_logit_softcapping": 2.0})
    changed = changed_copy(plain)
    outputs = []
    for model in (plain, changed):
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            outputs.append(model(IDS, labels=IDS))
    wanted, logits = (output.logits for output in outputs)
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, logits.ndim) == (wanted.shape, wanted.dtype, 3)
    assert logits.device == wanted.device
    assert logits.numel() == wanted.numel()
    assert logits.nbytes == wanted.nbytes
    assert not logits.is_computed
    torch.testing.assert_close(logits.detach(), wanted.detach())
    assert logits.is_computed
    assert logits.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        for output in outputs:
            output.logits.float().square().sum().backward()
        pairs = zip(plain.parameters(), changed.parameters(), strict=True)
        assert all(torch.equal(own.grad, ours.grad) for own, ours in pairs)


READERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda logits: torch.from_numpy(logits.numpy()),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits)),
    "deepcopy": copy.deepcopy,
    "index": lambda logits: torch.stack(list(logits))[..., :],
    "cat": lambda logits: torch.cat([logits, logits])[:2],
    "out": lambda logits: torch.add(logits, 0, out=torch.empty(logits.shape)),
    "argument": lambda logits: torch.zeros(logits.shape).copy_(logits),
    "autograd": lambda logits: Doubled.apply(logits) / 2,
    "scaled": lambda logits: (2.0 * (logits / 4).float().contiguous()) * 2,
    "written": lambda logits: logits.mul_(3) / 3,
}


class Doubled(torch.autograd.Function):
    """Such functions do not ask a class of tensors first."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.gelu(logits) * 0 + logits * 2


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_logits_gets_numbers(reader: str) -> None:
    plain = tiny("llama")
    changed = changed_copy(plain)
    with torch.no_grad():
        wanted, logits = (model(IDS, labels=IDS).logits for model in (plain, changed))
        torch.testing.assert_close(READERS[reader](logits) + 0, wanted)


def test_what_is_written_into_logits_stays() -> None:
    """A cast to the dtype that they have is no copy, and an operation before keeps its
    values."""
    changed = changed_copy(tiny("llama"))
    with torch.no_grad():
        logits = changed(IDS, labels=IDS).logits
    scaled = logits * 2
    assert logits.float() is logits
    assert logits.contiguous() is logits
    before = logits.clone()
    logits.zero_()
    assert not (logits * 2).any()
    torch.testing.assert_close(scaled + 0, 2 * before)


def test_logits_that_are_moved_are_not_read() -> None:
    """Trainers cast what a model returns, and Accelerate's hooks move it."""
    changed = changed_copy(tiny("llama"))
    logits = changed(IDS, labels=IDS).logits
    wide = logits.to(torch.float64)
    assert logits.to("cpu") is logits
    assert logits.to(device="cpu", dtype=torch.float32, non_blocking=True) is logits
    away = wide.to("meta", non_blocking=True)
    assert (away.device.type, away.dtype, away.shape) == (
        "meta",
        torch.float64,
        logits.shape,
    )
    assert not any(one.is_computed for one in (logits, wide, away))
    assert type(away + 0) is torch.Tensor
    assert (away + 0).is_meta
    copied = logits.to(torch.float32, copy=True)
    torch.testing.assert_close(wide.detach(), copied.detach().double())


@pytest.mark.parametrize("before", [False, True])
def test_a_model_with_hooks_of_accelerate(before: bool) -> None:
    """``device_map``: each module has another forward, and what the model returns is
    moved."""
    accelerate = pytest.importorskip("accelerate")

    def dispatch(model: Any) -> None:
        parts = (
            "model.embed_tokens",
            "model.layers",
            "model.norm",
            "model.rotary_emb",
            "lm_head",
        )
        places = dict.fromkeys(parts, "cpu")
        accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)

    plain = tiny("llama").train()
    changed = copy.deepcopy(plain)
    if before:
        dispatch(changed)
    changed = changed_copy(changed)
    if not before:
        dispatch(changed)
    logits = assert_same_step(plain, changed).logits
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed


def test_logits_of_weights_that_have_changed_are_refused() -> None:
    changed = changed_copy(tiny("llama").train())
    optimizer = torch.optim.SGD(changed.parameters(), 0.1)
    output = changed(IDS, labels=IDS)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="read the logits earlier"):
        output.logits.detach()


def test_weights_that_change_before_the_backward_are_refused() -> None:
    """The backward computed logits of the changed weights: wrong gradients, where the
    model without changes has torch's error."""
    changed = changed_copy(tiny("gemma2").train())
    loss = changed(IDS, labels=IDS).loss
    with torch.no_grad():
        changed.get_output_embeddings().weight.mul_(2)
    with pytest.raises(RuntimeError, match="change weights after the backward"):
        loss.backward()
    plain = copy.deepcopy(changed)
    long_context(plain, checkpoints=None, attention=False, chunked_loss=False)
    for model in (plain, changed):
        model.zero_grad()
    assert_same_step(plain, changed)


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
def test_a_hook_of_logits_is_told_that_it_does_not_see_the_loss(hook: str) -> None:
    """It was never called, and a gradient that it was to clip stayed as it was, without
    a word."""
    changed = changed_copy(tiny("llama").train())
    logits = changed(IDS, labels=IDS).logits
    arguments = [torch.neg] if hook == "register_hook" else []
    with pytest.warns(UserWarning, match="gradients of these logits do not include"):
        getattr(logits, hook)(*arguments)


def test_many_logits_that_are_read_are_warned_of() -> None:
    changed = changed_copy(tiny("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed(IDS, labels=IDS)
        changed(IDS[:, :9], labels=IDS[:, :9]).logits.sum()
    with pytest.warns(UserWarning, match="they were read"):
        changed(IDS, labels=IDS).logits.sum()


def test_a_trainer_predicts(tmp_path: Any) -> None:
    """It returned ``()``, and what ``compute_metrics`` was given had no predictions."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    plain = tiny("llama")
    changed = changed_copy(plain)
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    predictions = []
    for model in (plain, changed):
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = Trainer(
            model,
            arguments,
            compute_metrics=lambda of: {"mean": float(of.predictions.mean())},
        )
        predictions.append(trainer.predict(data))  # type: ignore[arg-type]
    np.testing.assert_allclose(
        predictions[1].predictions, predictions[0].predictions, atol=1e-6
    )
    assert predictions[1].metrics["test_mean"] == pytest.approx(
        predictions[0].metrics["test_mean"]
    )


@pytest.mark.slow
def test_a_compiled_model_and_a_compiled_reader() -> None:
    """The compiler followed the tensor's own functions until it ran out of stack."""
    plain = tiny("llama", {"num_hidden_layers": 1}).train()
    changed = changed_copy(plain)
    for model in (plain, changed):
        torch.manual_seed(0)
        adapt(model)
    compiled = torch.compile(changed, backend="aot_eager")
    outputs = [model(IDS, labels=IDS) for model in (plain, compiled)]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    assert not outputs[1].logits.is_computed
    read = torch.compile(
        lambda logits: logits.logsumexp(-1).mean(), backend="aot_eager"
    )
    torch.testing.assert_close(read(outputs[1].logits), read(outputs[0].logits))


@pytest.mark.parametrize("first", [False, True])
def test_weights_of_ranks(first: bool) -> None:
    """FSDP: in training without logits, in evaluation with them; changed before or
    after it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = tiny("llama").train()
        changed = changed_copy(plain) if first else copy.deepcopy(plain)
        fully_shard(
            changed, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True
        )
        if not first:
            summary = long_context(
                changed, checkpoints=None, attention=False, mlp_tile=None
            )
            assert "chunked loss" in summary.done, summary
        outputs = [model(IDS, labels=IDS) for model in (plain, changed)]
        assert outputs[1].logits is None
        for output in outputs:
            output.loss.backward()
        for ours, own in zip(changed.parameters(), plain.parameters(), strict=True):
            grad = ours.grad.full_tensor()
            torch.testing.assert_close(grad, own.grad, atol=1e-6, rtol=1e-4)
        with torch.no_grad():
            logits = changed.eval()(IDS, labels=IDS).logits
        torch.testing.assert_close(logits, outputs[0].logits)
    finally:
        dist.destroy_process_group()
