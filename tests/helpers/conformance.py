"""Random calls, and what each way of computing a call has to give: the textbook's, in
float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import quorum_attention as qa
from helpers.attention import GRADIENT_TOLERANCE
from helpers.masks import exact, off, random_mask
from quorum_attention import Mask
from quorum_attention.call.options import CallOptions
from quorum_attention.execution.report import Report
from quorum_attention.files import create_tensors, open_tensors
from quorum_attention.files.file_call import file_call
from quorum_attention.files.output import output_of
from quorum_attention.files.run import run_call
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.ray import Farm

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
Found = dict[str, torch.Tensor]


class Case:
    """A random call.

    Attributes:
        draw: for what a runner chooses: parts, chunks.
        inputs: query, key, value and the upstream gradient.
        mask, options: arguments of ``attention``.
    """

    def __init__(self, seed: int, *, alike: bool = False) -> None:
        """``alike``: as many keys as queries."""
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        batch = draw.choice([(1,), (2,), (3,), (), (2, 2)])
        kv_heads, share = draw.randint(1, 3), draw.choice([1, 1, 2, 3])
        n = draw.choice([1, 5, 40, 150, 300])
        m = n if alike or draw.random() < 0.5 else draw.choice([1, 33, 200, 310])
        double = torch.float64
        self.dtype = draw.choice(
            [double, double, torch.float32, torch.float16, torch.bfloat16]
        )
        heads = kv_heads * share
        shapes = (heads, n, 8), (kv_heads, m, 8), (kv_heads, m, 16), (heads, n, 16)
        self.inputs = [torch.randn(*batch, *shape).to(self.dtype) for shape in shapes]
        self.options: dict[str, Any] = {
            "is_causal": draw.random() < 0.4, "scale": draw.choice([None, 0.3, -0.3])
        }  # fmt: skip
        self.mask: Mask | torch.Tensor | None = None
        kind = draw.choice(["plain", "mask", "mask", "mask", "tensor"])
        entries = self.inputs[0].shape[:-3].numel()
        sizes = [draw.choice([1, size]) for size in (entries, heads, n, m)]
        bias = torch.randn(sizes[len(batch) != 1 :]).to(self.dtype)
        if draw.random() < 0.4:
            # Wider than the inputs, and so large that their dtype would round it by
            # many units.
            bias = bias.float() - 1000 + 7 * torch.arange(bias.shape[-1]).float()
        if kind == "mask":
            mask = random_mask(draw, entries, heads, n, m)
            if draw.random() < 0.3:
                mask = replace(mask, softcap=draw.choice([1.0, 5.0, 30.0]))
            if draw.random() < 0.3:
                mask = replace(mask, sinks=2 * torch.randn(heads, dtype=self.dtype))
            if draw.random() < 0.3:
                mask = replace(mask, bias=bias)
            self.mask = mask
        elif kind == "tensor":
            self.mask = bias if draw.random() < 0.5 else bias > -0.5
        if draw.random() < 0.15:
            self.options |= {"dropout_p": 0.3, "dropout_seed": draw.randrange(1 << 40)}

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.inputs[:3]]
        return f"{shapes} {self.dtype} {self.options} {self.mask}"

    def check(self, found: Found) -> None:
        """Compare what was found with the textbook; bias and sinks have gradients where
        they are named."""
        mask = (
            Mask(bias=self.mask)
            if isinstance(self.mask, torch.Tensor)
            else self.mask or Mask()
        )
        if "grad_bias" in found and mask.bias is not None:
            mask = replace(mask, bias=mask.bias.detach().requires_grad_())
        p, seed = self.options.get("dropout_p"), self.options.get("dropout_seed")
        flat = [t.reshape(-1, *t.shape[-3:]) for t in self.inputs]
        wanted = exact(
            *flat, mask, self.options["scale"] or self.inputs[0].shape[-1] ** -0.5,
            is_causal=self.options["is_causal"], dropout=None if p is None else Dropout(p, seed),
        )  # fmt: skip
        named = dict(
            zip(NAMES, (wanted.out, wanted.lse, *wanted.grads[:3]), strict=True)
        )
        rest = list(wanted.grads[3:])
        if mask.sinks is not None:
            named["grad_sinks"] = rest.pop(0)
        if rest:
            named["grad_bias"] = rest.pop(0)
        for name, tensor in found.items():
            dtype = self.dtype
            if name == "lse":
                dtype = torch.float64 if dtype == torch.float64 else torch.float32
            elif name == "grad_bias" and mask.bias is not None:
                dtype = mask.bias.dtype
            assert tensor.dtype == dtype, (name, tensor.dtype, str(self))
            apart = off(tensor.reshape(named[name].shape), named[name])
            # A gradient of a bias may be narrower than the inputs.
            allowed = max(
                GRADIENT_TOLERANCE[self.dtype], GRADIENT_TOLERANCE[tensor.dtype]
            )
            assert apart <= allowed, (name, apart, str(self))


def wrong_calls(
    run: Callable[[Case], Found], first: int, count: int, **options: Any
) -> int:
    """How many of so many drawn calls are wrong."""
    wrong = 0
    for seed in range(first, first + count):
        case = Case(seed, **options)
        try:
            case.check(run(case))
        except Exception as error:
            wrong += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    return wrong


def learning(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    """The mask with a bias and sinks that have gradients, and these by the names of
    those."""
    mask, more = case.mask, dict[str, torch.Tensor]()
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        mask = more["grad_bias"] = mask.clone().requires_grad_()
    elif isinstance(mask, Mask):
        for name in ("bias", "sinks"):
            if (tensor := getattr(mask, name)) is not None:
                more[f"grad_{name}"] = tensor.clone().requires_grad_()
                mask = replace(mask, **{name: more[f"grad_{name}"]})
    return mask, more


def on_one_device(case: Case) -> Found:
    """By a drawn kernel, cut to a drawn depth, or within a drawn budget."""
    how, kernel = (
        case.draw.choice(["free", "depth", "budget"]),
        case.draw.choice(["auto", "dense"]),
    )
    options: dict[str, Any] = {"kernel": kernel, "report": qa.Report()}
    if how == "depth" and max(t.shape[-2] for t in case.inputs) > 128:
        options["depth"] = case.draw.choice([1, 2])
    elif how == "budget":
        try:
            on_devices(case, None, budget=1, **options)
        except qa.BudgetError as error:
            options["budget"] = int(
                error.smallest_bytes * case.draw.choice([1, 1.3, 3])
            )
    return on_devices(case, None, **options)


def on_devices(case: Case, devices: Any, **options: Any) -> Found:
    """By autograd, with the gradients of a bias and of sinks."""
    leaves = [t.clone().requires_grad_() for t in case.inputs[:3]]
    mask, more = learning(case)
    options = {**case.options, **options, "enable_gqa": True, "devices": devices}
    out, lse = qa.attention_with_lse(*leaves, mask, **options)
    out.backward(case.inputs[3])
    named = dict(zip(NAMES[2:], leaves, strict=True)) | more
    grads = {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
    assert grads.keys() == named.keys()
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def in_files(path: Path, tensors: Found, *, writable: bool = False) -> Found:
    """Tensors mapped from a new file, in their order."""
    made = create_tensors(
        path, {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    )
    for name, tensor in tensors.items():
        made[name].copy_(tensor)
    del made
    found = open_tensors(path, writable=writable)
    return {name: found[name] for name in tensors}


def by_farm(case: Case, farm: Farm, folder: Path, chunks: int | None = None) -> Found:
    """From files to files; what is left in the folder beside them is an error."""
    names = ("query", "key", "value", "grad_out")
    *three, grad = in_files(
        folder / "in", dict(zip(names, case.inputs, strict=True))
    ).values()
    query, key, value = (tuple(t.shape) for t in three)
    state = torch.float64 if case.dtype == torch.float64 else torch.float32
    shapes = dict(
        zip(
            NAMES,
            ((*query[:-1], value[-1]), query[:-1], query, key, value),
            strict=True,
        )
    )
    made = create_tensors(
        folder / "made",
        {n: (s, state if n == "lse" else case.dtype) for n, s in shapes.items()},
    )
    if "dropout_p" not in case.options and chunks is None:
        chunks = case.draw.choice([None, 1, 3, 7, 7, 13])
    more = {
        **case.options,
        "attn_mask": case.mask,
        "enable_gqa": True,
        "chunks": chunks,
    }
    farm.attention_with_lse(*three, out=made["out"], lse=made["lse"], **more)
    grads = tuple(made[name] for name in NAMES[2:])
    farm.attention_backward(grad, *three, made["out"], made["lse"], grads=grads, **more)
    assert sorted(path.name for path in folder.iterdir()) == ["in", "made"]
    for path in folder.iterdir():
        path.unlink()
    return {name: made[name] for name in NAMES}


def by_files(case: Case, folder: Path) -> Found:
    """``run``'s way, without its command line."""
    tensors, found = (
        dict(zip(("query", "key", "value"), case.inputs, strict=False)),
        Found(),
    )
    for name in ("forward", "backward"):
        if name == "backward":
            tensors |= {
                "grad_out": case.inputs[3],
                "out": found["out"],
                "lse": found["lse"],
            }
        options = CallOptions(devices=torch.device("cpu"), budget=64 << 20)
        call = file_call(options, tensors, case.mask, enable_gqa=True, **case.options)
        output = output_of(str(folder / name), call.results(lse=name == "forward"), {})
        heads = case.draw.choice([None, 1, 2, 5])
        run_call(call, output, {}, [], Report(), heads=heads)
        found |= open_tensors(folder / name)
    assert sorted(path.name for path in folder.iterdir()) == ["backward", "forward"]
    for path in folder.iterdir():
        path.unlink()
    grads = dict(
        zip(NAMES[2:], (found.pop(name) for name in ("dq", "dk", "dv")), strict=True)
    )
    return found | grads
