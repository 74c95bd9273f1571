"""Functions that torch.compile does not compile: it breaks the graph once around each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_REASON = "quorum_attention plans and runs a call outside the graph"


def uncompiled(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """``function`` under ``torch.compiler.disable`` once torch's compiler has been loaded.

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


def _skip(code: CodeType) -> None:
    """Tell the compiler to skip this code (but not the functions it calls).

    It does nothing if torch has moved this function elsewhere; the graph then breaks once more.
    """
    with suppress(AttributeError, ImportError):
        from torch._C._dynamo import eval_frame

        frame: Any = eval_frame
        action = frame._FrameAction
        strategy = frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frame.set_code_exec_strategy(code, strategy)
