"""A keyword argument that a public function does not have: the error names what was
meant."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import keywords
from quorum_attention.api import attention
from quorum_attention.keywords import nearest

Q = torch.zeros(1, 2, 8, 4)
MODULES = ["", ".distributed", ".devices", ".recipes", ".kernels.kit"]
MODULES += [".integrations.transformers"] if find_spec("transformers") else []
MODULES += [".ray"] if find_spec("ray") else []
# What users read, and do not make; functions without options; and what takes any name,
# as Transformers asks it to.
NOT_ASKED = {
    "BudgetError", "OutOfMemoryError", "InnerKernel", "Plan", "Report", "kernels", "unpatch_sdpa",
    "PoolPass", "PoolReport", "close", "ShardedReport", "ModelShape", "StepMemory", "LongContext",
    "DilatedSetting", "causal", "document", "prefix_lm", "sliding_window", "quorum_mask",
    "interest_set", "is_interest_set", "paired_interest_set", "quorum_sizes", "register_kernel",
    "longest_that_fits", "read_shape", "step_memory", "switch_until_it_fits",
    "sharded_positions", "unpatch",
}  # fmt: skip


def public() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in MODULES:
        module = importlib.import_module(f"quorum_attention{part}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and name not in NOT_ASKED:
                found[f"{part.rpartition('.')[2]} {name}".strip()] = value
    return found


FUNCTIONS = public()


def asked_for(function: Callable[..., Any], **named: Any) -> str:
    """What the error says about keyword arguments beside what a call has to have."""
    given: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.kind == 1:
            given.append(
                {"n_tokens": 64, "tokens": 64, "mesh": Q}.get(parameter.name, Q)
            )

    def call() -> None:
        function(
            *given, **named
        ).__enter__()  # `context_parallel` is a generator until then

    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unknown_option_is_named(name: str) -> None:
    said = asked_for(FUNCTIONS[name], no_such_option=1)
    assert re.fullmatch(r"[\w.]+\(\) has no 'no_such_option'; it has \w+.*", said), said
    assert "__init__" not in said


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_that_is_misspelt_is_found(name: str) -> None:
    function = FUNCTIONS[name]
    options = re.findall(
        r"\w+", asked_for(function, no_such_option=1).partition("it has ")[2]
    )
    assert options
    for option in options:
        if len(option) >= 6:
            missing_letter = option[:3] + option[4:]
            said = asked_for(function, **{missing_letter: None})
            assert re.search(r"did you mean \w+\?|; use ", said), said
            assert nearest(missing_letter, options) in said


ELSEWHERE = {
    "causal": "attention() has no 'causal'; use is_causal (or ",
    "softmax_scale": "attention() has no 'softmax_scale'; use scale",
    "dropout": "attention() has no 'dropout'; use dropout_p",
    "mask": "attention() has no 'mask'; use attn_mask",
    "attn_bias": "attention() has no 'attn_bias'; use attn_mask",
    "window_size": "attention() has no 'window_size'; use attn_mask=Mask(window=...)",
    "softcap": "attention() has no 'softcap'; use attn_mask=Mask(softcap=...)",
    "cu_seqlens_q": "attention() has no 'cu_seqlens_q'; use attn_mask=Mask(documents=...)",
    "alibi_slopes": "attention() has no 'alibi_slopes'; use kernel=NativeKernel(alibi_slopes=...)",
    "device": "attention() has no 'device'; use devices",
    "isCausal": "attention() has no 'isCausal'; did you mean is_causal?",
    "total": "attention() has no 'total'",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_names_of_other_libraries_are_known(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        qa.attention(Q, Q, Q, **{name: 1})
    assert str(caught.value).startswith(ELSEWHERE[name])


def test_what_is_suggested_exists() -> None:
    """Every option that stands for another library's is one of a public function; every
    expression gives a field that there is."""
    options = {
        option
        for function in FUNCTIONS.values()
        for option in re.findall(
            r"\w+", asked_for(function, no_such_option=1).partition("it has ")[2]
        )
    }
    for meanings in keywords._ELSEWHERE.values():
        for meant in meanings:
            assert meant.partition("=")[0] in options
            for made, field in re.findall(r"(Mask|NativeKernel)\((\w+)=", meant):
                assert field in inspect.signature(getattr(qa, made)).parameters
            for made in re.findall(r"=(\w+)\(", meant):
                assert hasattr(qa, made)


def test_settings_say_what_belongs_to_a_call() -> None:
    with pytest.raises(
        TypeError, match="is_causal is no option of settings; give it to the call"
    ):
        qa.using(is_causal=True)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=re.escape("patched_sdpa() has no 'budgets'; did you mean")
    ):
        qa.patched_sdpa(budgets=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "function", [qa.patched_sdpa, qa.patched_flex_attention, qa.patch_sdpa]
)
def test_patches_say_which_names_they_have(function: Any) -> None:
    """They listed names of ``using`` alone, and ``sdpa`` was an error of an inner
    function."""
    name = function.__name__
    says = f"{name}() has no 'min_token'; did you mean min_tokens?"
    with pytest.raises(TypeError, match=re.escape(says)):
        function(min_token=1)
    says = f"{name}() has no 'sdpa'; it has min_tokens, "
    with pytest.raises(TypeError, match=re.escape(says)):
        function(sdpa=True)


@pytest.mark.parametrize("name", ["min_tokens", "sdpa", "enabled", "flex"])
def test_settings_take_no_name_of_patches(name: str) -> None:
    """``using(min_tokens=)`` was taken without a word, and changed patches around."""
    with pytest.raises(TypeError, match=re.escape(f"using() has no {name!r}")):
        qa.using(**{name: 1})  # type: ignore[arg-type]


def test_signatures_stay() -> None:
    assert "is_causal" in inspect.signature(attention).parameters
    assert "n_tokens" in inspect.signature(qa.plan).parameters
    assert "window" in inspect.signature(qa.Mask).parameters


def test_a_mask_is_made_while_torch_compiles() -> None:
    def call(query: torch.Tensor) -> torch.Tensor:
        return qa.attention(
            query, query, query, attn_mask=qa.Mask(causal=True, softcap=20.0)
        )

    query = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), call(query))
