"""``check``: does a kernel of your own stay exact when calls are cut? Exit status: 0 if
it does, 1 if not, 2 on errors.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any

import quorum_attention
from quorum_attention.checking import check_kernel
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, warn


def add_to(commands: Any) -> None:
    """Add the command."""
    summary = "test whether a kernel of your own stays exact when calls are cut"
    parser = shared.add_command(commands, "check", summary, __doc__, _run)
    words = (
        "a registered name; or module:name of a kernel, or of a function that returns "
        "(out, lse)"
    )
    parser.add_argument("kernel", help=words)
    usual = inspect.signature(check_kernel).parameters
    shared.add(
        parser,
        (
            "--tokens",
            shared.count_of,
            "number of queries and of keys",
            usual["n_tokens"].default,
        ),
        ("--heads", shared.count_of, "query heads", usual["heads"].default),
        shared.KV_HEADS,
        (
            "--head-dim",
            shared.count_of,
            "dimension of a head",
            usual["head_dim"].default,
        ),
        ("--dtype", shared.dtype_of, f"one of {', '.join(shared.DTYPES)}", "float32"),
        ("--causal", bool, "test only causal calls, or only others (default: both)"),
        ("--forward-only", None, "leave the gradients out"),
        shared.DEVICE,
        shared.JSON,
    )


def load_kernel(name: str) -> Any:
    """The kernel that ``name`` means: a registered name as it is, or the object that
    ``module:name`` names. A function is made a kernel.

    Raises:
        ValueError: there is no such module or object, or importing it would end the
            program.
        TypeError: the object is neither a kernel nor a function.
    """
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    imported = _import(module)
    try:
        named_object = attrgetter(attribute)(imported)
    except AttributeError:
        raise ValueError(f"{module} has no {attribute!r}") from None
    from quorum_attention.kernels import InnerKernel
    from quorum_attention.kernels.kit import from_lse_function

    if isinstance(named_object, InnerKernel):
        return named_object
    # A class in place of a kernel is a mistake, which ``check_kernel`` reports.
    if InnerKernel in getattr(named_object, "__mro__", ()):
        return named_object
    if callable(named_object):
        return from_lse_function(named_object)
    kind = type(named_object).__name__
    raise TypeError(f"{name} is neither an inner kernel nor a function: {kind}")


def _import(module: str) -> Any:
    """Import a module, also from the folder in which the command runs."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec(module.partition(".")[0]) is None or module.endswith(
        ".py"
    ):
        raise ValueError(
            f"there is no module {module!r} here or installed: give module:function, "
            "without .py, from the folder where the module lies"
        )
    try:
        return importlib.import_module(module)
    except SystemExit as error:  # its status would be taken for a verdict
        raise ValueError(
            f"{module} ends the program while it is imported: put what it does as a "
            "script under "
            f'`if __name__ == "__main__":`'
        ) from error


def _run(options: argparse.Namespace) -> int:
    try:
        result = check_kernel(
            load_kernel(options.kernel),
            n_tokens=options.tokens,
            heads=options.heads,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            dtype=options.dtype,
            is_causal=options.causal,
            backward=not options.forward_only,
            device=shared.default_device(options.device),
            progress=True,
        )
    except Exception as error:
        package = quorum_attention.__path__[0]
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].filename.startswith(package):
            raise
        # The kernel's own frames are what its author can act on.
        kernel_frames = [
            frame for frame in frames if not frame.filename.startswith(package)
        ]
        lines = traceback.format_list(kernel_frames) + traceback.format_exception_only(
            error
        )
        warn(f"{options.kernel} failed:\n{''.join(lines).rstrip()}")
        return 2
    if options.json:
        print_json(result.to_dict())
    else:
        say(str(result))
    return 0 if result.exact else 1
