"""The first call of a process, made inside some mode of the caller's, and one after it.

Run by a fresh process for each case (``test_traces.py``,
``gpu/test_cuda_first_calls.py``): nothing of the package has been imported there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers.attention import Inputs, assert_close, attention, exact

Attend = Callable[[torch.Tensor], torch.Tensor]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def attend_with(kernel: str) -> Attend:
    """Causal attention of (1, 4, n, d), its first two heads as keys and values."""

    @functools.cache
    def made() -> dict[str, Any]:
        import quorum_attention as qa

        return {
            "score_mod": lambda: {
                "kernel": qa.from_score_mod(lambda s, b, h, i, j: s + 0.0)
            },
            "function": lambda: {"kernel": qa.from_lse_function(attention)},
            "keeps": lambda: {"attn_mask": qa.Mask(keeps=lambda b, h, i, j: i >= j)},
            "window": lambda: {"attn_mask": qa.Mask(causal=True, window=4096)},
        }.get(kernel, lambda: {"kernel": kernel})()

    def attend(x: torch.Tensor) -> torch.Tensor:
        import quorum_attention as qa

        causal = "attn_mask" not in made()
        return qa.attention(
            x, x[:, :2], x[:, :2], enable_gqa=True, is_causal=causal, **made()
        )

    return attend


def check(
    x: torch.Tensor, out: torch.Tensor, grad: torch.Tensor | None, dtype: Any = None
) -> None:
    """Compare with float64; ``dtype``: the one computed in, if not x's."""
    wide = x.detach().cpu().double()
    keys = wide[:, :2]
    right = exact(
        Inputs(wide, keys, keys, torch.ones_like(wide)), is_causal=True, gradients=True
    )
    assert right.grads is not None
    assert_close(out, right.out, TOLERANCES[dtype or x.dtype])
    if grad is not None:
        right.grads[0][:, :2] += right.grads[1] + right.grads[2]
        assert_close(grad, right.grads[0], TOLERANCES[dtype or x.dtype])


def twice(
    attend: Attend, x: torch.Tensor, mode: Callable[[], Any] = nullcontext, dtype: Any = None, *,
    gradients: bool = True,
) -> None:  # fmt: skip
    """Two calls and their backwards inside ``mode``: both see the same of it."""
    seen = []
    for _ in range(2):
        leaf = x.detach().clone().requires_grad_(gradients)
        with mode() as found:
            out = attend(leaf)
            if gradients:
                out.sum().backward()
        check(x, out.clone(), leaf.grad, dtype)
        seen.append(list(found) if isinstance(found, list) else None)
    assert seen[0] == seen[1], f"the first call showed {seen[0]}, the second {seen[1]}"


def mapped(attend: Attend, x: torch.Tensor) -> None:
    out = torch.vmap(attend)(x[None])[0]
    check(x, out, torch.func.grad(lambda t: attend(t).sum())(x))


@contextmanager
def packing(refuse: bool = False) -> Iterator[list[Any]]:
    """Says what was saved for a backward; or nothing may be saved."""
    found: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        assert not refuse, f"saved: {tuple(tensor.shape)}"
        found.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


class Watching(TorchDispatchMode):
    """Says which operators were called."""

    def __enter__(self) -> list[str]:
        self.found: list[str] = []
        super().__enter__()
        return self.found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def setting(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        yield


def _checkpointed(attend: Attend, x: torch.Tensor, reentrant: bool) -> None:
    twice(functools.partial(checkpoint, attend, use_reentrant=reentrant), x)


def _narrow() -> Any:
    return setting(torch.set_default_dtype, torch.bfloat16, torch.float32)


def _deterministic() -> Any:
    return setting(torch.use_deterministic_algorithms, True, False)


MODES: dict[str, Callable[[Attend, torch.Tensor], None]] = {
    "checkpoint": lambda f, x: _checkpointed(f, x, False),
    "reentrant checkpoint": lambda f, x: _checkpointed(f, x, True),
    "hooks that count": lambda f, x: twice(f, x, packing),
    "hooks that raise": lambda f, x: twice(
        f, x, lambda: packing(refuse=True), gradients=False
    ),
    "save_on_cpu": lambda f, x: twice(f, x, torch.autograd.graph.save_on_cpu),
    "inference_mode": lambda f, x: twice(f, x, torch.inference_mode, gradients=False),
    "autocast": lambda f, x: twice(f, x, autocast, torch.bfloat16),
    "vmap": mapped,
    "compile": lambda f, x: twice(
        torch.compile(lambda t: f(t * 1), backend="aot_eager"), x
    ),
    "a dispatch mode": lambda f, x: twice(f, x, Watching),
    "anomaly mode": lambda f, x: twice(f, x, torch.autograd.detect_anomaly),
    "a default device": lambda f, x: twice(f, x, lambda: torch.device("meta")),
    "a narrow default dtype": lambda f, x: twice(f, x, _narrow),
    "deterministic": lambda f, x: twice(f, x, _deterministic),
}


def main(
    mode: str, kernel: str, device: str, dtype: str, tokens: int, width: int
) -> None:
    """A first call inside ``mode``, and plain ones: all are right."""
    torch.manual_seed(1)
    x = torch.randn(1, 4, tokens, width).to(device, getattr(torch, dtype))
    state = torch.get_rng_state()
    attend = attend_with(kernel)
    MODES[mode](attend, x)
    assert torch.equal(torch.get_rng_state(), state), (
        "random numbers of the caller's were drawn"
    )
    twice(attend, x)
