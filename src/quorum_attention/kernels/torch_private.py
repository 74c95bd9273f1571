"""What torch has no public name for: its modes and traces, the compiler's marks, its
operators.

Results and tensors that are cached are made outside all modes of the caller. The first
call may run under a default device, in inference mode, under autocast, inside a
function transformation, a dispatch mode or a checkpoint. What it caches (the answer of
a probe, a small tensor) must not depend on that, nor may the caller's hooks see it: a
checkpoint counts what is saved. A default dtype is the whole process's: what is cached
names its dtype.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import wraps
from traceback import clear_frames
from types import CodeType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.attention
from torch._C import _len_torch_function_stack
from torch._C._functorch import unwrap_if_dead as unwrap_if_dead
from torch._ops import mode_stack_state_for_pre_dispatch
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing as is_tracing
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_autograd: Any = torch._C._autograd
_functorch: Any = torch._C._functorch
_modes_before_dispatch = mode_stack_state_for_pre_dispatch()
# By names of this file: to look them up in torch takes short calls longer than to call
# them.
_is_grad_enabled = torch.is_grad_enabled
_has_torch_function = torch.overrides.has_torch_function_variadic
_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
_n_levels: Callable[[], int] = _functorch.get_dynamic_layer_stack_depth
_n_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
# torch's own classes of tensors: one of another class may stand for others.
PLAIN = (torch.Tensor, torch.nn.Parameter)
has_transforms = torch._C._are_functorch_transforms_active
"""Whether a transformation of torch.func's is active."""
stands_for_several: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a tensor is one of ``is_grads_batched``, which does not use torch.func."""


@contextmanager
def no_torch_modes() -> Iterator[None]:
    """Turn off all modes and transformations, gradients, hooks of saved tensors and the
    detection of anomalies. It is a context, ``with no_torch_modes()``, and a decorator,
    ``@no_torch_modes()``."""
    with ExitStack() as restored:
        # Default devices and other function modes, such as torch.device("meta") as a
        # context. They are taken off, not disabled: what is tried may have a mode of
        # its own.
        for mode in [_pop_mode() for _ in range(_len_torch_function_stack())]:
            restored.callback(_push_mode, mode)
        if has_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            restored.enter_context(_disable_current_modes())
        if has_transforms():
            from torch._functorch import pyfunctorch

            restored.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
        # First, because it also sets whether gradients are recorded.
        restored.enter_context(torch.inference_mode(False))
        restored.enter_context(no_grad_no_autocast())
        # The hooks are for code that records a graph of its own. Torch calls the
        # innermost hooks alone; where it has been told to refuse hooks, there are none.
        # A saved output would hold the graph that has it, for good.
        if _autograd._saved_tensors_hooks_is_enabled():
            restored.enter_context(
                torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, as_it_is)
            )
        if torch.is_anomaly_enabled():
            restored.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def has_modes() -> bool:
    """Whether a dispatch mode is active, also one that traces before dispatch."""
    return bool(_n_modes()) or _is_included(_PRE_DISPATCH)


def has_global_hooks() -> bool:
    """Whether somebody registered hooks of all modules."""
    hooks = torch.nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``."""
    return tensor


class GradAndAutocast(NamedTuple):
    """Whether a thread records gradients and casts automatically.

    Python raises an interrupt between any two steps: also between the step that turns
    gradients off and the one that makes sure that they are turned on again. So whoever
    calls what turns them off takes a snapshot before, and restores it when an error
    comes through.

    Attributes:
        grad_enabled: whether gradients are recorded.
        autocast_devices: the types of devices for which autocast is enabled.
    """

    grad_enabled: bool
    autocast_devices: tuple[str, ...]

    @classmethod
    def now(cls) -> GradAndAutocast:
        """Return a snapshot of this thread."""
        devices: tuple[str, ...] = ()
        if _is_any_autocast_enabled():
            devices = tuple(filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
        return cls(_is_grad_enabled(), devices)

    def restore(self) -> None:
        """Bring this thread back to the snapshot."""
        torch._C._set_grad_enabled(self.grad_enabled)
        for device_type in _AUTOCAST_DEVICES:
            was_enabled = device_type in self.autocast_devices
            if torch.is_autocast_enabled(device_type) != was_enabled:
                torch.set_autocast_enabled(device_type, was_enabled)


_AUTOCAST_DEVICES = ("cpu", "cuda")


def restores_grad_and_autocast(
    function: Callable[_Params, _Result],
) -> Callable[_Params, _Result]:
    """Return ``function`` such that after its errors gradients and autocast are as they
    were before, and neither a level of torch.vmap nor a function mode is left open."""

    @wraps(function)
    def call(*args: _Params.args, **named: _Params.kwargs) -> _Result:
        before = GradAndAutocast.now()
        n_levels = _n_levels()
        n_modes = _len_torch_function_stack()
        try:
            return function(*args, **named)
        except BaseException as error:
            end_contexts(error)
            _close_levels(n_levels, n_modes)
            before.restore()
            raise

    return call


def restores_modes_and_hooks(
    function: Callable[_Params, _Result],
) -> Callable[_Params, _Result]:
    """Return ``function`` such that after its errors, beside what
    ``restores_grad_and_autocast`` restores, no hooks of saved tensors are left behind,
    and autocast keeps its casts as before.

    It is for functions that set checkpoints, which take longer than a small call.
    """
    guarded = restores_grad_and_autocast(function)

    @wraps(function)
    def call(*args: _Params.args, **named: _Params.kwargs) -> _Result:
        hooks = _innermost_hooks()
        is_caching = torch.is_autocast_cache_enabled()
        try:
            return guarded(*args, **named)
        except BaseException:
            _remove_hooks_within(hooks)
            torch.set_autocast_cache_enabled(is_caching)
            raise

    return call


def end_contexts(error: BaseException | None) -> None:
    """End the contexts that an interrupt kept from ending: frames of its traceback hold
    them, and would change the thread's state when they are let go of."""
    while error is not None:
        if not isinstance(error, Exception):
            clear_frames(error.__traceback__)
        error = error.__context__


def _close_levels(n_levels: int, n_modes: int) -> None:
    """Close levels of torch.vmap and function modes beyond so many."""
    if _n_levels() > n_levels:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(n_levels)
    while _len_torch_function_stack() > n_modes:
        _pop_mode()


def _innermost_hooks() -> Any:
    """Return the hooks of saved tensors that torch calls in this thread, (pack,
    unpack), or None."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _remove_hooks_within(hooks: Any) -> None:
    """Remove the hooks of saved tensors that were set within ``hooks``."""
    innermost = _innermost_hooks()
    while innermost is not None and innermost != hooks:
        _autograd._pop_saved_tensors_default_hooks()
        innermost = _innermost_hooks()


class _NoGradNoAutocast:
    """The context of ``no_grad_no_autocast``."""

    def __enter__(self) -> None:
        self._before = GradAndAutocast.now()
        GradAndAutocast(False, ()).restore()

    def __exit__(self, *error: object) -> None:
        self._before.restore()


_NOTHING_TO_DO = nullcontext()


def no_grad_no_autocast() -> AbstractContextManager[object]:
    """Turn gradients off, and autocast, so that kernels compute in the dtypes of their
    inputs."""
    return _NOTHING_TO_DO if is_without_grad_and_autocast() else _NoGradNoAutocast()


def is_without_grad_and_autocast() -> bool:
    """Whether gradients are off, and autocast, already."""
    return not (_is_grad_enabled() or _is_any_autocast_enabled())


def has_no_numbers(*tensors: object) -> bool:
    """Whether a trace is active, or made one of ``tensors``: there are no numbers to
    compute with.

    ``torch.compile`` is not one of them: it breaks the graph where it cannot trace.
    """
    of_other_classes = [tensor for tensor in tensors if type(tensor) not in PLAIN]
    if any(map(is_fake, of_other_classes)):
        return True
    if not has_modes():
        return False
    if _modes_before_dispatch.count() > 0:
        return True
    keys = torch._C._TorchDispatchModeKey
    tracing_keys = (keys.PROXY, keys.FUNCTIONAL, keys.FAKE)
    return any(torch._C._get_dispatch_mode(key) is not None for key in tracing_keys)


def is_traced(*inputs: object) -> bool:
    """Whether a call is traced and should be one operator: by torch's compiler, make_fx
    or torch.export, of fake tensors, under functionalization, where a selective
    checkpoint chooses among operators, or where operations are counted."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if has_no_numbers(*inputs):
        return True
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ in _MODES_BY_OPERATOR for mode in modes)


_FLOP_COUNTER = "_FlopCounterMode"  # of torch.utils.flop_counter.FlopCounterMode
# The others are torch.utils.checkpoint's, of create_selective_checkpoint_contexts.
_MODES_BY_OPERATOR = (
    "_CachingTorchDispatchMode",
    "_CachedTorchDispatchMode",
    _FLOP_COUNTER,
)


def add_flop_formulas(formulas: dict[Any, Callable[..., int]]) -> None:
    """Give formulas of operators to the FlopCounterModes that are active.

    Their module registers formulas, but for counters that are made later, and its
    import takes longer than that of this package: so it is not imported here.
    """
    if not has_modes():
        return
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if type(mode).__name__ == _FLOP_COUNTER:
            mode.counter.flop_registry.update(formulas)  # type: ignore[attr-defined]


def has_own_torch_function(*inputs: object) -> bool:
    """Whether an input's class takes part in functions of torch by
    ``__torch_function__``, and is not within it already."""
    if not _has_torch_function(*inputs) or not torch._C._is_torch_function_enabled():
        return False
    classes = [type(tensor) for tensor in inputs if type(tensor) not in PLAIN]
    disabled = torch._C._disabled_torch_function_impl
    functions = [getattr(cls, "__torch_function__", disabled) for cls in classes]
    return any(function is not disabled for function in functions)


def refuse_traces(function: str, *tensors: torch.Tensor | None) -> None:
    """Raise an error if a call is being traced.

    Raises:
        NotImplementedError: a tracer is active, or one of ``tensors`` is a fake tensor.
    """
    if torch._C._is_tracing() or has_no_numbers(*tensors):
        raise NotImplementedError(
            f"{function} cannot be traced, by torch.jit.trace or like this: a trace's "
            "tensors have no numbers, and a call is planned by what runs right on the "
            "device. Call it outside; torch.compile does so by itself (a graph break)"
        )


def is_fake(tensor: object) -> bool:
    """Whether it is a tensor of a trace, which has no numbers."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def refuse_real_among_fake(
    names: Sequence[str], tensors: Sequence[torch.Tensor | None]
) -> None:
    """Refuse a tensor with numbers in a trace whose tensors have none.

    Args:
        names: what an error calls the tensors.
        tensors: of a traced call.

    Raises:
        TypeError: the trace takes no such tensor; by name.
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([tensor for tensor in tensors if tensor is not None])
    if mode is None or mode.allow_non_fake_inputs:
        return
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and not is_fake(tensor):
            raise TypeError(
                f"{name} must be a fake tensor, as others of this traced call are, got "
                "one with numbers: make it an argument of the traced function, or "
                "trace with make_fx(..., _allow_non_fake_inputs=True)"
            )


def has_tangent(*values: Any) -> bool:
    """Return whether a tensor of ``values``, or of a list in it, has a forward-mode
    tangent."""
    if forward_ad._current_level < 0:
        return False
    tensors = [
        value for value in tree_leaves(values) if isinstance(value, torch.Tensor)
    ]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: the host cannot wait for the device
    then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_REASON = (
    "quorum_attention plans and runs this call outside the graph: compile without "
    "fullgraph=True"
)


def uncompiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Return ``function`` under ``torch.compiler.disable`` once torch's compiler has
    been loaded.

    Loading the compiler takes longer than importing torch, so it is not loaded here.
    """
    disabled: Callable[_Params, _Result] | None = None

    @wraps(function)
    def call(*args: _Params.args, **named: _Params.kwargs) -> _Result:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        if disabled is None:
            disabled = torch._dynamo.disable(function)
        return disabled(*args, **named)

    # The marks that torch.compiler.disable would have put on ``call`` for the compiler.
    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    _skip(marked.__code__)
    return call


def as_written(function: Any) -> Any:
    """Return the function that a compiled one was made of; others are returned."""
    return getattr(function, "_torchdynamo_orig_callable", function)


class _EagerRegion:
    """Lets compiled functions run as they were written.

    Torch has one stance for all threads. The first thread sets it, and the last one
    sets it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._stance_before: Any = None

    def enter(self, caller: object) -> None:
        with self._lock:
            if self._stance_before is None:
                self._stance_before = torch._dynamo.eval_frame._stance
            self._inside.add(caller)
            torch.compiler.set_stance("force_eager")

    def leave(self, caller: object) -> None:
        """Leave the region, also if an interrupt came before ``enter`` was over."""
        with self._lock:
            self._inside.discard(caller)
            if self._inside or self._stance_before is None:
                return
            torch._dynamo.eval_frame._set_stance(self._stance_before)
            self._stance_before = None


_eager_region = _EagerRegion()


@contextmanager
def compiled_run_eagerly() -> Iterator[None]:
    """Let compiled functions and modules run as they were written, in all threads."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    caller = object()
    try:
        _eager_region.enter(caller)
        yield
    finally:
        _eager_region.leave(caller)


@contextmanager
def without_loading_compiler() -> Iterator[None]:
    """Have ``torch.compiler.disable`` mark functions without loading torch's compiler.

    It is for imports of packages that decorate functions by it: to load the compiler
    takes 1.3 s of 2.4.
    """
    original: Any = torch.compiler.disable

    def disable(fn: Any = None, recursive: bool = True, *, reason: Any = None) -> Any:
        if recursive and inspect.isfunction(fn):
            return uncompiled(fn)
        return original(fn, recursive, reason=reason)

    torch.compiler.disable = disable
    try:
        yield
    finally:
        torch.compiler.disable = original


def _skip(code: CodeType) -> None:
    """Tell the compiler to skip this code (but not the functions it calls).

    It does nothing if torch has moved this function elsewhere; the graph then breaks
    once more.
    """
    with suppress(AttributeError, ImportError):
        from torch._C._dynamo import eval_frame

        frame: Any = eval_frame
        action = frame._FrameAction
        strategy = frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frame.set_code_exec_strategy(code, strategy)


def lock_pages_with_threads() -> None:
    """Let torch page-lock memory with eight threads, in a fraction of the time.

    Not if the allocator's settings already say how.
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None or "pinned_" in settings:
        return
    our_settings = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    change(f"{settings},{our_settings}" if settings else our_settings)


def allows_tf32() -> bool:
    """Tell whether torch may round the factors of fp32 products to TF32 on a GPU."""
    matmul: Any = torch.backends.cuda.matmul
    # Since 2.9. Where a caller has set the precision by its new name, asking by the old
    # one is an error.
    precision = getattr(matmul, "fp32_precision", None)
    if precision is None:
        return bool(matmul.allow_tf32)
    return bool(precision == "tf32")


def flash_implementation() -> Any:
    """Return the name of what torch's flash operators have been replaced by
    (``activate_flash_attention_impl``, from torch 2.11 or so on); None: they are
    torch's own."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


def register_derivative(
    library: torch.library.Library,
    name: str,
    derivative: Callable[..., Any],
    save: Callable[..., None] | None,
    refuse_forward_mode: Callable[[], None],
    before: Callable[[], None],
) -> None:
    """Register the reverse-mode derivative of an operator, and an error for forward
    mode.

    ``torch.library.register_autograd`` drops tangents: results have none, which means
    that they do not depend on the inputs. So the same implementation is registered
    behind a check.

    Args:
        library: in which the operator is defined.
        name: of the operator, without its namespace.
        derivative, save: as ``torch.library.register_autograd`` takes them.
        refuse_forward_mode: raises the error.
        before: called before each call of the operator.
    """
    try:
        from torch._library.autograd import Info, make_autograd_impl
    except ImportError:
        warnings.warn(
            f"torch {torch.__version__} keeps its implementation of derivatives "
            "elsewhere: compiled and traced calls of attention drop forward-mode "
            "tangents without an error",
            stacklevel=2,
        )
        qualified_name = f"{library.ns}::{name}"
        torch.library.register_autograd(
            qualified_name, derivative, setup_context=save, lib=library
        )
        return
    operator = getattr(getattr(torch.ops, library.ns), name).default
    reverse_mode = make_autograd_impl(operator, Info(derivative, save))

    def dispatch(keyset: Any, *args: Any, **named: Any) -> Any:
        if has_tangent(args):
            refuse_forward_mode()
        before()
        return reverse_mode(keyset, *args, **named)

    library.impl(name, dispatch, "Autograd", with_keyset=True)


def first_derivative(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the ``backward`` of an autograd function one whose derivative is an error.

    torch's ``once_differentiable`` says so only where the upstream gradient requires
    one. Of a sum it does not: then what came out was a constant, and a penalty on
    gradients lost its part without a word. The error is torch's own, a RuntimeError.

    Args:
        name: the name of the function that the user called.
    """

    def wrapped(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grad_outputs: Any) -> Any:
            is_recorded = torch.is_grad_enabled()
            if has_tangent(grad_outputs):
                raise NotImplementedError(
                    f"forward-mode derivatives of {name} are not supported"
                )
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            if not is_recorded:
                return grads
            message = f"second derivatives of {name} are not supported"
            refuse: Any = torch._C._functions.DelayedError(message.encode(), len(grads))
            return refuse(
                *(g if g is None else g.detach().requires_grad_() for g in grads)
            )

        return once

    return wrapped
