"""The first call of a process, made inside some mode of the caller's, and what is kept of it.

Run by a fresh process for each case (``test_first_calls.py``, ``gpu/test_cuda_first_calls.py``):
nothing of the package has been imported there.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Attend = Callable[[torch.Tensor], torch.Tensor]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def attend_with(kernel: str) -> Attend:
    """Causal attention of (1, 4, n, d), its first two heads as keys and values."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        import quorum_attention as qa

        if kernel not in made:
            made[kernel] = {
                "score_mod": lambda: {"kernel": qa.from_score_mod(lambda s, b, h, i, j: s + 0.0)},
                "function": lambda: {"kernel": qa.from_lse_function(_function)},
                "keeps": lambda: {"attn_mask": qa.Mask(keeps=lambda b, h, i, j: i >= j)},
                "window": lambda: {"attn_mask": qa.Mask(causal=True, window=4096)},
            }.get(kernel, lambda: {"kernel": kernel})()
        causal = {} if "attn_mask" in made[kernel] else {"is_causal": True}
        return qa.attention(x, x[:, :2], x[:, :2], enable_gqa=True, **causal, **made[kernel])

    made: dict[str, dict[str, Any]] = {}
    return attend


def _function(query, key, value, *, is_causal, scale):  # type: ignore[no-untyped-def]
    scores = scale * (query @ key.mT)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of the sum, in float64 on the CPU."""
    leaf = x.detach().to("cpu", torch.float64).requires_grad_()
    keys = leaf[:, :2].repeat_interleave(2, 1)
    scores = leaf @ keys.mT / x.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ keys
    return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]


def check(x: torch.Tensor, out: torch.Tensor, grad: torch.Tensor | None, dtype: Any = None) -> None:
    """Compare with float64; ``dtype``: the one computed in, if not x's."""
    bound = TOLERANCES[dtype or x.dtype]
    for found, wanted in zip((out, grad), exact(x), strict=True):
        if found is not None:
            off = (
                found.detach().to("cpu", torch.float64) - wanted
            ).abs().max() / wanted.abs().max()
            assert off <= bound, f"off by {off:.1e}"


def twice(attend: Attend, x: torch.Tensor, mode: Callable[[], Any], dtype: Any = None) -> None:
    """Two calls and their backwards inside ``mode``: both see the same of it."""
    seen = []
    for _ in range(2):
        leaf = x.detach().clone().requires_grad_()
        with mode() as found:
            out = attend(leaf)
            out.sum().backward()
        check(x, out, leaf.grad, dtype)
        seen.append(list(found) if isinstance(found, list) else None)
    assert seen[0] == seen[1], f"the first call showed {seen[0]}, the second {seen[1]}"


def without_gradients(attend: Attend, x: torch.Tensor, mode: Callable[[], Any]) -> None:
    with mode():
        out = attend(x.detach())
    check(x, out.clone(), None)


def checkpointed(attend: Attend, x: torch.Tensor, **how: Any) -> None:
    leaf = x.detach().clone().requires_grad_()
    out = checkpoint(attend, leaf, **how)
    out.sum().backward()
    check(x, out, leaf.grad)


def compiled(attend: Attend, x: torch.Tensor) -> None:
    leaf = x.detach().clone().requires_grad_()
    out = torch.compile(lambda t: attend(t * 1), backend="aot_eager")(leaf)
    out.sum().backward()
    check(x, out, leaf.grad)


def mapped(attend: Attend, x: torch.Tensor) -> None:
    out = torch.vmap(attend)(x[None])[0]
    grad = torch.func.grad(lambda t: attend(t).sum())(x)
    check(x, out, grad)


def faked(attend: Attend, x: torch.Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert attend(mode.from_tensor(x)).shape == x.shape


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


class Dispatching(TorchDispatchMode):
    """Says which operators were called."""

    def __enter__(self) -> list[str]:  # type: ignore[override]
        self.found: list[str] = []
        super().__enter__()
        return self.found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    """Says which of torch's functions made tensors."""

    def __enter__(self) -> list[str]:  # type: ignore[override]
        self.found: list[str] = []
        super().__enter__()
        return self.found

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.found.append(str(func))
        return made


@contextmanager
def setting(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def narrow() -> Any:
    return setting(torch.set_default_dtype, torch.bfloat16, torch.float32)


def wide() -> Any:
    return setting(torch.set_default_dtype, torch.float64, torch.float32)


def deterministic() -> Any:
    return setting(torch.use_deterministic_algorithms, True, False)


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        yield


MODES: dict[str, Callable[[Attend, torch.Tensor], None]] = {
    "nothing": lambda f, x: without_gradients(f, x, torch.enable_grad),
    "checkpoint": lambda f, x: checkpointed(f, x, use_reentrant=False),
    "reentrant checkpoint": lambda f, x: checkpointed(f, x, use_reentrant=True),
    "hooks that count": lambda f, x: twice(f, x, packing),
    "hooks that raise": lambda f, x: without_gradients(f, x, lambda: packing(refuse=True)),
    "save_on_cpu": lambda f, x: twice(f, x, torch.autograd.graph.save_on_cpu),
    "inference_mode": lambda f, x: without_gradients(f, x, torch.inference_mode),
    "no_grad": lambda f, x: without_gradients(f, x, torch.no_grad),
    "autocast": lambda f, x: twice(f, x, autocast, torch.bfloat16),
    "vmap": mapped,
    "compile": compiled,
    "a fake mode": faked,
    "a dispatch mode": lambda f, x: twice(f, x, Dispatching),
    "a function mode": lambda f, x: twice(f, x, Overriding),
    "anomaly mode": lambda f, x: twice(f, x, torch.autograd.detect_anomaly),
    "a default device": lambda f, x: twice(f, x, lambda: torch.device("meta")),
    "a narrow default dtype": lambda f, x: twice(f, x, narrow),
    "a wide default dtype": lambda f, x: twice(f, x, wide),
    "deterministic": lambda f, x: twice(f, x, deterministic),
}


def facts() -> dict[str, object]:
    """Every fact without arguments that this package keeps, found out now if it was not yet."""
    caches = [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]
    return {
        f"{one.__module__}.{one.__qualname__}": one()
        for one in caches
        if one.__module__.startswith("quorum_attention.kernels")
        and not inspect.signature(one).parameters
    }


def main(mode: str, kernel: str, device: str, dtype: str, tokens: int, width: int) -> None:
    """Prints the facts that are kept after a first call inside ``mode``, and a plain one."""
    torch.manual_seed(1)
    x = torch.randn(1, 4, tokens, width).to(device, getattr(torch, dtype))
    state = torch.get_rng_state()
    attend = attend_with(kernel)
    MODES[mode](attend, x)
    assert torch.equal(torch.get_rng_state(), state), "random numbers of the caller's were drawn"
    leaf = x.clone().requires_grad_()
    out = attend(leaf)
    out.sum().backward()
    check(x, out, leaf.grad)
    told = facts()
    # Read from disk, not found out.
    told.pop("quorum_attention.kernels.probe._memo", None)
    print(sorted((name, str(fact)) for name, fact in told.items()))
