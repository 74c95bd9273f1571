"""Attention as one operator: compiled, exported, mapped, checkpointed; with settings,
objects."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention import assert_close
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import quorum_attention as qa
from quorum_attention.kernels import DenseKernel
from quorum_attention.operator.shapes import fake_backward

pytestmark = pytest.mark.usefixtures("one_thread")
ours = functools.partial(qa.attention, enable_gqa=True)
OPERATOR = (
    torch.ops.quorum_attention.attention.default
)  # there once ``attention`` is imported
Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def three(n: int = 50, *, grad: bool = True, kv_heads: int = 2) -> list[torch.Tensor]:
    shapes = [(2, 4, n, 8), (2, kv_heads, n, 8), (2, kv_heads, n, 8)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes]


def grads_of(function: Function, given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def agree(
    found: Function,
    wanted: Function | None = None,
    lengths: tuple[int, ...] = (50, 40, 61),
    tolerance: float = 1e-10,
    more: Callable[[int], list[torch.Tensor]] = lambda n: [],
) -> None:
    """Both give the same results and gradients, the first without a break of its graph
    and with at most two graphs for all lengths; without ``wanted`` as the first does
    outside of a graph."""
    made = compiled(found)
    torch._dynamo.utils.counters.clear()
    for n in lengths:
        given = [*three(n), *more(n)]
        assert_close(grads_of(made, given), grads_of(wanted or found, given), tolerance)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def torchs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
) -> torch.Tensor:
    return sdpa(q, k, v, enable_gqa=True, **more)


@pytest.mark.slow
def test_options_of_every_kind() -> None:
    report = qa.Report()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = ours(q, k, v, is_causal=True, budget="1GiB", kernel="dense", depth=1)
        out = out + ours(q, k, v, kernel="dense")
        out = out + ours(
            q, k, v, devices=[torch.device("cpu")], accumulator="device", scale=0.3
        )
        return out + qa.attention_with_lse(q, k, v, enable_gqa=True, budget=1 << 30)[0]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        two = 2 * torchs(q, k, v) + torchs(q, k, v, scale=0.3)
        return two + torchs(q, k, v, is_causal=True)

    with qa.using(report=report):
        agree(call, plain, (50, 40, 61, 70, 33))
    assert report.total.forwards == report.total.backwards == 20
    assert report.total.kernels["dense"] == 20


@pytest.mark.slow
def test_shapes_of_gradients_read_arguments_by_the_names_of_the_schema() -> None:
    """Which gradients are wanted was read from the last two places, whatever a change
    of the schema would put there."""
    schema = torch.ops.quorum_attention.attention_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert list(inspect.signature(fake_backward).parameters) == names


@pytest.mark.slow
def test_a_value_may_vary_and_the_budget_is_that_of_the_graph() -> None:
    report, q = qa.Report(), three(grad=False)[0]
    call = compiled(lambda q, budget: qa.attention(q, q, q, depth=1, budget=budget))
    for budget in (1 << 30, 1 << 29, "2GiB", 12345678):
        with qa.using(report=report):
            assert_close(call(q, budget), sdpa(q, q, q), 1e-10)
    with pytest.raises(qa.BudgetError):
        call(q, 1000)
    call = compiled(lambda q, cap: qa.attention(q, q, q, qa.Mask(softcap=cap)))
    for cap in (0.5, 2.0, 0.25):
        assert_close(call(q, cap), qa.attention(q, q, q, qa.Mask(softcap=cap)), 1e-10)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "options",
    [{"kernel": DenseKernel()}, {"report": qa.Report()}, {"progress": lambda *done: None},
     {"attn_mask": qa.Mask(keeps=lambda b, h, q, k: k >= 0)}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_objects_break_the_graph_and_are_refused_by_other_traces(
    options: dict[str, Any],
) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    given = three(grad=False)
    made = torch.compile(lambda *t: ours(*t, **options) + 1, backend="eager")
    assert_close(made(*given), torchs(*given) + 1, 1e-10)
    with pytest.raises(NotImplementedError, match="attention cannot be traced"):
        make_fx(lambda *t: ours(*t, **options))(*given)


def kept(q: torch.Tensor) -> torch.Tensor:
    at = torch.arange(q.shape[-2])
    return at[:, None] >= at - 3


def ahead(k: torch.Tensor, q: torch.Tensor) -> qa.Mask:
    return qa.Mask(causal=True, offset=k.shape[-2] - q.shape[-2] + 7)


def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A mask that is described in the graph, with tensors and numbers that vary."""
    mask = qa.Mask(causal="lower_right", documents=torch.arange(q.shape[-2]) // 17)
    return ours(q, k, v, mask | qa.Mask(window=3), depth=1)


def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    kept = torch.arange(k.shape[-2]) != 3
    mask = qa.Mask(causal=True, key_padding=kept) | qa.Mask(window=3)
    mask &= qa.Mask(window=20) & qa.Mask(softcap=5.0, sinks=q[0, :, 0, 0])
    return ours(q, k, v, mask & qa.Mask(causal="lower_right", offset=2))


def learned(*given: torch.Tensor) -> torch.Tensor:
    q, k, v, sinks, bias = given
    mask = qa.Mask(causal=True, sinks=sinks, bias=bias)
    out, lse = qa.attention_with_lse(q, k, v, mask, enable_gqa=True, depth=1)
    return out + lse[..., None].sin()


MADE = qa.Mask(causal=True, window=9, chunk=30)
# A call, and what it is held against.
CALLS: dict[str, tuple[Function, Function | None]] = {
    "broadcast": (
        lambda q, k, v: qa.attention(q.mT.contiguous().mT, k[:1, :1], v[:1, :1]),
        lambda q, k, v: sdpa(q, k[:1, :1], v[:1, :1]),
    ),
    "a learned mask": (
        lambda q, k, v: ours(q, k, v, (q @ q.mT)[:, :1], depth=1),
        lambda q, k, v: torchs(q, k, v, attn_mask=(q @ q.mT)[:, :1]),
    ),
    "a boolean mask": (
        lambda q, k, v: ours(q, k, v, kept(q)),
        lambda q, k, v: torchs(q, k, v, attn_mask=kept(q)),
    ),
    "a number that varies": (
        lambda q, k, v: ours(q[:, :, 7:], k, v, ahead(k, q)),
        lambda q, k, v: torchs(q, k, v, is_causal=True)[:, :, 7:],
    ),
    "a mask made outside": (lambda q, k, v: ours(q, k, v, MADE), None),
    "a mask made inside": (inside, None),
    "masks joined inside": (joined, None),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("what", CALLS)
def test_shapes_and_masks_of_every_kind(what: str) -> None:
    agree(*CALLS[what], (300, 50, 40))


@pytest.mark.slow
def test_sinks_and_bias_and_log_sum_exp_get_their_gradients() -> None:
    double = {"dtype": torch.float64}
    agree(
        learned, more=lambda n: [torch.randn(4, **double), torch.randn(n, n, **double)]
    )


@pytest.mark.slow
def test_dtypes_are_those_of_where_the_call_stands() -> None:
    def low(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = ours(*given)
            assert out.dtype == torch.bfloat16
            return out.float()

    given = [t.float().detach() for t in three()]
    assert_close(compiled(low)(*given), low(*given), 1e-12)
    agree(lambda q, k, v: ours(q, k, v, out_dtype=torch.float32).double(),
          lambda q, k, v: torchs(q, k, v).float().double(), tolerance=1e-6)  # fmt: skip


def _by_number(q: torch.Tensor, n: int) -> torch.Tensor:
    return ours(q, q, q, qa.Mask(keeps=lambda b, h, i, j: (j < n) | (j == i)))


def _by_tensor(q: torch.Tensor, n: int) -> torch.Tensor:
    kept = torch.arange(q.shape[-2]) < n
    return ours(q, q, q, qa.Mask(keeps=lambda b, h, i, j: kept[j] | (j == i)))


def _by_nothing(q: torch.Tensor, n: int) -> torch.Tensor:
    return ours(q * n, q, q, qa.Mask(keeps=lambda b, h, i, j: (j < 7) | (j == i)))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("function", [_by_number, _by_tensor, _by_nothing])
def test_a_function_of_a_mask_that_is_made_in_the_compiled_code(
    function: Function,
) -> None:
    """One a call, whose backward comes when all calls are made: as that of layers
    does."""
    made, q = torch.compile(function, backend="aot_eager"), three()[0]
    several = [(made(q, n), function(q, n)) for n in (3, 11, 20, 11)]
    gc.collect()
    for found, wanted in several:
        of_found, of_wanted = (
            torch.autograd.grad(t.square().sum(), q)[0] for t in (found, wanted)
        )
        assert_close(found, wanted, 1e-12)
        assert_close(of_found, of_wanted, 1e-12)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "through", [lambda call: call, compiled], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
def test_dropout_is_the_same_in_the_backward_also_of_a_checkpoint(
    kind: str, through: Callable[[Function], Function]
) -> None:
    """With a seed as outside of the graph; without one, of the pairs that the forward
    kept."""

    def block(seed: int | None, *given: torch.Tensor) -> torch.Tensor:
        return ours(*given, dropout_p=0.4, dropout_seed=seed, kernel="dense")

    def checked(seed: int | None) -> Function:
        call = functools.partial(block, seed)
        if kind == "plain":
            return call
        return lambda *given: checkpoint(
            call, *given, use_reentrant=kind == "reentrant"
        )

    given = three()
    out, *_, of_value = grads_of(through(checked(None)), given)
    # The output is linear in the value.
    assert_close((of_value * given[2]).sum(), 2 * out.square().sum(), 1e-10)
    wanted = grads_of(functools.partial(block, 5), given)
    assert_close(grads_of(through(checked(5)), given), wanted, 1e-10)


@pytest.mark.slow
def test_transformations_inside_of_compiled_code_run_outside_of_its_graph() -> None:
    def gradient(function: Function) -> Function:
        return torch.func.grad(lambda *t: function(*t).square().sum(), (0, 1, 2))

    given = three(grad=False)
    for found, wanted in (
        (torch.vmap(ours), torchs),
        (lambda *t: gradient(ours)(*t)[1], lambda *t: gradient(torchs)(*t)[1]),
    ):
        made = torch.compile(found, backend="aot_eager")
        assert_close(made(*given), wanted(*given), 1e-9)


def test_a_backward_of_a_backward_is_refused_in_compiled_code() -> None:
    q, k, v = three(10)
    out = compiled(ours)(q, k, v).square().sum()
    with pytest.raises(Exception, match=r"double backward|second derivatives"):
        torch.autograd.grad(out, q, create_graph=True)[0].sum().backward()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_settings_are_those_of_the_moment_and_go_to_the_backward(through: str) -> None:
    inside, outside = qa.Report(), qa.Report()
    call, given = (compiled(ours) if through == "compiled" else ours), three()
    call(*given)
    with qa.using(depth=1, report=inside):
        out = call(*given)
    with qa.using(depth=2, report=outside):
        out.sum().backward()
    assert (inside.total.forwards, inside.total.backwards, inside.total.cut) == (
        1,
        1,
        2,
    )
    assert outside.total.backwards == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1, (
        "no recompilation"
    )


@pytest.mark.slow
def test_a_block_of_settings_inside_of_compiled_code() -> None:
    """The graph breaks around the block, which then runs as it is."""
    report = qa.Report()

    @torch.compile(backend="aot_eager")
    def call(q: torch.Tensor) -> torch.Tensor:
        with qa.using(depth=1, report=report):
            out = qa.attention(q, q, q) * 2
        return qa.attention(out, out, out)

    q = three()[0]
    for _ in range(2):
        twice = 2 * sdpa(q, q, q)
        assert_close(call(q), sdpa(twice, twice, twice), 1e-10)
    assert report.total.forwards == report.total.cut == 2


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_lengths_that_vary_saved_and_loaded(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return qa.attention(
                *given, is_causal=True, depth=1, enable_gqa=True, budget="1GiB"
            )

    n = torch.export.Dim("n", min=4, max=4096)
    made = torch.export.export(
        Model(),
        tuple(three(grad=False)),
        strict=strict,
        dynamic_shapes=(({2: n},) * 3,),
    )
    file = io.BytesIO()
    torch.export.save(made, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (50, 77):
        given = three(length, grad=False)
        assert_close(loaded(*given), torchs(*given, is_causal=True), 1e-10)


class TwoCalls(torch.nn.Module):
    """A call without options, and one of tensors, numbers and options."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(32) // 9)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        described = qa.Mask(causal=True, documents=self.ids)
        return ours(q, k, v, is_causal=True) + ours(q, k, v, described, depth=1)


# The compiler's time is that of headers and optimisations, which are not tested here.
QUICK_TO_COMPILE = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_package_of_compiled_code(tmp_path: Path) -> None:
    """AOTInductor's, which passes no empty lists on."""
    from torch._inductor import config as inductor_config

    known_options = inductor_config.get_config_copy()
    options = {
        name: value for name, value in QUICK_TO_COMPILE.items() if name in known_options
    }
    with torch.no_grad():
        given = three(32, grad=False)
        exported = torch.export.export(TwoCalls(), tuple(given))
        path = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "calls.pt2"),
            inductor_configs=options,
        )
        assert_close(
            [torch._inductor.aoti_load_package(path)(*given)], [TwoCalls()(*given)], 0.0
        )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("through", ["eager", "compiled"])
@pytest.mark.parametrize(
    "kind", ["reentrant", "not reentrant", "recompute", "save", "save by name"]
)
def test_checkpoints_of_every_kind(kind: str, through: str) -> None:
    """Of a selective one, the operator can be named in the policy; then it runs once.
    Policies of TRL and Axolotl keep what has "flash_attn" in its name."""
    report, asked = qa.Report(), []
    weight = torch.randn(8, 8, dtype=torch.float64)

    def policy(ctx: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        asked.append(operator)
        is_kept = {
            "save": operator is OPERATOR,
            "save by name": "flash_attn" in str(operator),
        }
        save = is_kept.get(kind, False)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    how: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind in ("recompute", "save", "save by name"):
        how["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, policy
        )

    def block(attention: Function, *given: torch.Tensor) -> torch.Tensor:
        return attention(given[0] @ weight, *given[1:], is_causal=True).sin()

    mine = functools.partial(block, functools.partial(ours, depth=1))

    def checked(*given: torch.Tensor) -> torch.Tensor:
        return checkpoint(mine, *given, **how)

    given = three()
    with qa.using(report=report):
        found = grads_of(compiled(checked) if through == "compiled" else checked, given)
    assert_close(found, grads_of(functools.partial(block, torchs), given), 1e-10)
    assert report.total.forwards == (1 if kind.startswith("save") else 2)
    assert report.total.backwards == 1
    assert (OPERATOR in asked) == ("context_fn" in how)


_DOCUMENTS = torch.arange(20) // 7
REAL: dict[str, Any] = {
    "attn_mask": torch.zeros(20, 20, dtype=torch.float64),
    "attn_mask of a Mask": qa.Mask(bias=torch.zeros(20, 20, dtype=torch.float64)),
    "Mask.sinks": qa.Mask(sinks=torch.zeros(4)),
    "a tensor of the Mask": qa.Mask(documents=_DOCUMENTS) | qa.Mask(window=2),
}


@pytest.mark.parametrize("name", REAL)
def test_a_mask_with_numbers_in_a_trace_of_fake_tensors(name: str) -> None:
    """Refused by name, where torch's own function ends in an assertion; right where it
    may be."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = three(20, grad=False)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return ours(*tensors, REAL[name])

    for mode in ("fake", "symbolic"):
        with pytest.raises(
            TypeError, match=f"^{name.partition(' of a Mask')[0]}.* must be a fake"
        ):
            make_fx(call, tracing_mode=mode)(*given)
        traced = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(*given)
        assert_close(traced(*given), call(*given), 1e-12)
