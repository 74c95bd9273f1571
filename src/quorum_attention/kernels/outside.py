"""Real tensors on real devices, whatever the caller runs under: for what is found out and kept.

A first call may come under a default device, in inference mode, under autocast, inside a
transformation or a dispatch mode. What is made there and kept (a probe's answer, a small tensor on
its device) has to be what it would have been anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch


@contextmanager
def outside() -> Iterator[None]:
    """Every mode and transformation that is on is off in here, gradients too."""
    with ExitStack() as off:
        # Default devices, and other modes that see functions: torch.device("meta") as a context.
        off.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
            from torch.utils._python_dispatch import _disable_current_modes

            off.enter_context(_disable_current_modes())
        if torch._C._are_functorch_transforms_active():
            from torch._functorch import pyfunctorch

            off.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
        # First of the two that set whether gradients are recorded.
        off.enter_context(torch.inference_mode(False))
        off.enter_context(torch.no_grad())
        off.enter_context(without_autocast("cpu", "cuda"))
        yield


def without_autocast(*device_types: str) -> AbstractContextManager[object]:
    """No cast on the way: in here kernels compute in the dtypes that they were given."""
    on = [kind for kind in device_types if torch.is_autocast_enabled(kind)]
    if not on:
        return nullcontext()
    off = ExitStack()
    for kind in on:
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


def tracing() -> str | None:
    """What is being traced by, in words, if anything is: there are no numbers then to compute with.

    Not ``torch.compile``, which steps around what it cannot trace.
    """
    if torch._C._is_tracing():
        return "torch.jit.trace"
    if not torch._C._len_torch_dispatch_stack() and not _len_torch_dispatch_stack_pre_dispatch():
        return None
    keys = torch._C._TorchDispatchModeKey
    if _len_torch_dispatch_stack_pre_dispatch() or torch._C._get_dispatch_mode(keys.PROXY):
        return "make_fx or torch.export"
    if torch._C._get_dispatch_mode(keys.FUNCTIONAL):
        return "functionalization"
    return "a FakeTensorMode" if torch._C._get_dispatch_mode(keys.FAKE) else None


def refuse_traces(function: str, **tensors: torch.Tensor | None) -> None:
    """Refuse to be traced, by the name of what is.

    Raises:
        NotImplementedError: a trace is going on, or a tensor is one that has no numbers.
    """
    found = tracing()
    where = f"under {found}"
    for name, tensor in tensors.items():
        if found is None and type(tensor) not in _REAL and _is_fake(tensor):
            found, where = name, f"{name} is a fake tensor: there"
    if found is not None:
        raise NotImplementedError(
            f"{function} cannot be traced: {where} tensors have no numbers, and a call is planned "
            f"by what runs right on the device. Call it outside; torch.compile does so by itself "
            f"(a graph break)"
        )


_REAL = (torch.Tensor, torch.nn.Parameter, type(None))


def _is_fake(tensor: torch.Tensor | None) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: nothing can be waited for, so nothing found out."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
