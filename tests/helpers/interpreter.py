"""Triton's interpreter, without what it does again at each call of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_language_once_a_launch() -> None:
    """Let a launch replace Triton's language once for each module of functions.

    The interpreter looks for what to replace at each call of a function inside a
    kernel, too, where all has been replaced: a quarter of the time of a launch.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version, which does it in another way
    patch: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    patched_modules: set[str] = set()

    def patch_once(function: Any) -> Any:
        if function.__module__ in patched_modules:
            return interpreter._LangPatchScope()
        patched_modules.add(function.__module__)
        return patch(function)

    def launch_patched(executor: Any, *args: Any, **named: Any) -> Any:
        patched_modules.clear()
        try:
            return launch(executor, *args, **named)
        finally:
            patched_modules.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_patched
