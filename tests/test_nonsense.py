"""Whatever makes no sense gets an error that names the argument, what came and what is
allowed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import quorum_attention as qa

Q, IDS = torch.randn(1, 2, 50, 8), torch.arange(50)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor(
            [torch.randn(2, 50, 8), torch.randn(2, 40, 8)]
        )


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty_like(Q)


LAZY = (nested, inferred)
# A tensor without memory of its own.
STANDS = TwoTensor(Q, Q)
MANY = torch.zeros(1, 2, 50, 8, requires_grad=True)
PLAN = qa.plan(50, heads=2, head_dim=8, dtype=torch.float32)
UNSUPPORTED = NotImplementedError
CALLS = [
    ({"devices": "cuda"}, ValueError, "devices is 'cuda', but there is no CUDA device"),
    ({"devices": "xyz"}, ValueError, "devices must be .* got 'xyz'"),
    ({"devices": []}, UNSUPPORTED, "devices must name one device, got 0"),
    ({"devices": "meta"}, UNSUPPORTED, "devices must be 'cpu' or 'cuda'"),
    ({"devices": ["cpu", "cpu"], "budget": ["1MiB"]}, ValueError,
     "budget must be one number of bytes or one for each of the 2 devices, got 1"),
    (dict.fromkeys(("query", "key", "value"), Q.to("meta")), UNSUPPORTED,
     "query must be on a CPU or CUDA device, got 'meta'"),
    ({"key": Q.to("meta")}, ValueError, "key must be on the query's device cpu, got meta"),
    ({"query": nested}, UNSUPPORTED, "query must be a .* got a nested one"),
    ({"value": Q.to_sparse()}, UNSUPPORTED, "value must be .* sparse_coo"),
    ({"key": STANDS}, UNSUPPORTED, "key must be .* plain .* a TwoTensor"),
    ({"attn_mask": qa.Mask(causal=True) | qa.Mask(documents=TwoTensor(IDS, IDS))},
     UNSUPPORTED, "Mask.documents must be a plain tensor, got a TwoTensor"),
    ({"query": [1.0, 2.0]}, TypeError, "query must be a torch.Tensor .* got list"),
    ({"query": Q[0, 0, 0]}, ValueError, r"query must have at least 2 dim.* got shape \(8,\)"),
    ({"query": Q.int()}, TypeError, "query must be one of float16.*got torch.int32"),
    ({"key": Q.half()}, TypeError, "key must have the query's dtype torch.float32, got .*16"),
    ({"query": Q.expand(2, -1, -1, -1), "value": Q.expand(4, 3, -1, -1, -1)}, ValueError,
     "query, key and value must have batch dimensions that broadcast, got"),
    ({"key": Q[..., :4]}, ValueError, "key must have the query's head_dim 8, got 4"),
    ({"value": Q[:, :, :9]}, ValueError, r"value must have the key's heads and tokens \(2, 50"),
    ({"query": Q[..., :0], "key": Q[..., :0]}, ValueError, "head_dim of at least 1, got 0"),
    ({"value": Q[..., :0]}, ValueError, "value_dim of at least 1, got 0"),
    ({"query": Q.repeat(1, 2, 1, 1)}, ValueError, "key has 2 heads .* enable_gqa=True"),
    ({"query": Q[:, :1].expand(1, 3, 50, 8), "enable_gqa": True}, ValueError,
     "multiple of the key's 2 heads, got 3"),
    ({"enable_gqa": "yes"}, TypeError, "enable_gqa must be True or False"),
    ({"attn_mask": torch.zeros(50, 50, device="meta")}, UNSUPPORTED,
     "attn_mask must be on a CPU or CUDA device, got 'meta'"),
    ({"attn_mask": torch.zeros(50, 49)}, ValueError, r"attn_mask must broadcast .*\(50, 49\)"),
    ({"attn_mask": torch.zeros(50, 50).int()}, TypeError, "attn_mask must be bool or one of"),
    ({"is_causal": torch.ones(50, 50)}, TypeError, "is_causal must be True or False"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"scale": True}, TypeError, "scale must be a real number, got True"),
    ({"scale": torch.ones((), requires_grad=True)}, TypeError, "scale must be a real number"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be from 0 to 1"),
    ({"dropout_seed": -1}, ValueError, "dropout_seed must be at least 0"),
    ({"depth": "deep"}, ValueError, "depth must be 'auto' or .* got 'deep'"),
    ({"depth": True}, ValueError, "depth must be"),
    # Seven times the tasks with every level, and each as large as before: it would
    # never end.
    ({"depth": 10}, ValueError, r"at most . for 50 tokens.*more levels make no"),
    ({"depth": 1, "plan": PLAN}, ValueError, "plan and depth cannot both be given"),
    ({"plan": 3}, TypeError, "plan must be a quorum_attention.Plan, got 3"),
    ({"budget": True}, TypeError, "budget must be a whole .* got True"),
    ({"budget": -5}, ValueError, "budget must be at least 0, got -5"),
    ({"accumulator": "disk"}, ValueError, "accumulator must be .* got 'disk'"),
    ({"kernel": qa.NativeKernel}, TypeError, "not the class NativeKernel"),
    ({"kernel": "magic"}, ValueError, "no kernel is named 'magic'; there are: "),
    ({"kernel": "cudnn"}, UNSUPPORTED, "kernel 'cudnn' cannot run this call"),
    ({"out_dtype": torch.int8}, TypeError, "out_dtype must be None or one of .*int8"),
    ({"out": Q.to("meta")}, ValueError, "out must be in host memory .* got meta"),
    ({"out": inferred}, ValueError, "out must not be a tensor of inference mode outside of it"),
    ({"out": Q[:, :, :9]}, ValueError, r"out must have shape \(1, 2, 50, 8\), got"),
    ({"out": Q, "out_dtype": torch.half}, TypeError, "out must be torch.float16, got"),
    ({"out": MANY}, ValueError, "out must not require a gradient"),
    ({"out": Q[:, :1].expand(1, 2, 50, 8)}, ValueError, "out must not overlap itself"),
    ({"progress": "yes"}, TypeError, "progress must be None, True or"),
    ({"report": {}}, TypeError, "report must be a quorum_attention.Report, got {}"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "says"), CALLS)
def test_a_call(change: dict[str, object], kind: type[Exception], says: str) -> None:
    """The message names the argument, what came and what is allowed."""
    if torch.cuda.is_available() and change in (
        {"devices": "cuda"},
        {"kernel": "cudnn"},
    ):
        pytest.skip("it would go there")
    given = {"query": Q, "key": Q, "value": Q, **change}
    with pytest.raises(kind, match=says):
        qa.attention(**{n: v() if v in LAZY else v for n, v in given.items()})


PLANS = {
    "n_tokens": (-1, 1.5, True, None, 10**30), "n_keys": (-1, "x"), "heads": (0, 1.0),
    "kv_heads": ("x", 3), "head_dim": (0, None), "value_dim": (0, "x"), "batch": (0, (1,)),
    "dtype": (torch.int8, "float16"), "is_causal": ("no", 1),
    "budget": (-1, "x", "9" * 400, 1.5, True), "levels": ("7", 7, (7.0,), (0,), (8,), (True,)),
    "depth": (-1, "auto", True), "layout": ("x", None), "tile": (0, 1.5), "inputs": ("x", "host"),
    "device": ("xyz", "meta", 0), "accumulator": ("x", 3), "heads_per_group": (0, 9, "x"),
    "n_cap": (0, "x", True), "streams": (0, 3), "over_inputs": ("x", 1), "backward": ("x", 1),
    "kernel": ("x", None, qa.NativeKernel),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in PLANS.items() for value in values],
)
def test_a_plan(name: str, value: object) -> None:
    sizes = {"n_tokens": 300, "device": "cpu", "heads": 8, name: value}
    with pytest.raises(
        (ValueError, TypeError, NotImplementedError), match=f"{name}|chunks"
    ) as e:
        qa.plan(**sizes)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300
    if name in ("levels", "depth", "backward"):
        return
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=name):
        qa.estimate(**sizes)


def test_numpy_integers_are_integers() -> None:
    """In plans, calls and budgets; also NumPy's own truth values."""
    plain = {"n_tokens": 300, "heads": 2, "head_dim": 8, "tile": 16}
    numpys = {name: np.int32(value) for name, value in plain.items()}
    more = {
        "levels": (7, 3),
        "budget": 1 << 30,
        "dtype": torch.float32,
        "device": "cpu",
    }
    theirs = {
        "levels": np.array([7, 3]),
        "budget": np.int64(1 << 30),
        "is_causal": np.True_,
    }
    assert qa.plan(**{**numpys, **more, **theirs}) == qa.plan(
        **{**plain, **more, "is_causal": True}
    )
    assert all(type(c) is int for c in qa.plan(**{**numpys, **more, **theirs}).levels)
    for change in (
        {"budget": np.int64(1 << 30), "depth": np.int64(1), "scale": np.float32(0.25)},
        {"scale": torch.tensor(0.25), "is_causal": np.True_},
    ):
        assert qa.attention(Q, Q, Q, **change).shape == Q.shape
    assert qa.interest_set(np.int64(3)) == (0, 1, 3)
    with pytest.raises(TypeError, match="l must be a whole number"):
        qa.interest_set(True)


OTHERS = {
    "calibrate a device of no kind": (lambda: qa.calibrate("xyz"), "device must be"),
    "calibrate integers": (lambda: qa.calibrate("cpu", torch.int8), "dtype must be"),
    "check nothing": (lambda: qa.check_kernel("no such"), "no kernel is named"),
    "check a class": (lambda: qa.check_kernel(qa.NativeKernel), "kernel must be a name or"),
    "check no tokens": (lambda: qa.check_kernel("dense", n_tokens=-1), "n_tokens must be"),
    "check impossible levels": (lambda: qa.check_kernel("dense", levels=((8,),)), "8 chunks"),
    "check a seed": (lambda: qa.check_kernel("dense", seed="x"), "seed must be"),
    "check a factor": (
        lambda: qa.check_kernel("dense", scale_of_inputs=float("nan")), "scale_of_inputs must be",
    ),
    "a window of words": (lambda: qa.NativeKernel(window="x"), "window must be .* got 'x'"),
    "a cap in words": (lambda: qa.NativeKernel(softcap="x"), "softcap must be"),
    "slopes in a list": (lambda: qa.NativeKernel(alibi_slopes=[1.0]), "alibi_slopes must be"),
    "tf32 in words": (lambda: qa.NativeKernel(allow_tf32="x"), "allow_tf32 must be"),
    "a number for a name": (lambda: qa.from_lse_function(len, name=3), "name must be a str"),
    "no score_mod": (lambda: qa.from_score_mod(3), "score_mod must be callable"),
    "no settings": (lambda: qa.LongNetKernel(3), "settings must be"),
    "half a segment": (lambda: qa.LongNetKernel([(1.5, 1)]), "segment must be a whole number"),
    "sizes of words": (lambda: qa.quorum_sizes(None), "max_l must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_public_functions(case: str) -> None:
    call, says = OTHERS[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        call()
