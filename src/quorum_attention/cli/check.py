"""``check``: does a kernel of your own stay exact when calls are cut? Exit status: 0 if it does, 1
if not, 2 on errors.
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
        "a registered name; or module:name of a kernel, or of a function that returns (out, lse)"
    )
    parser.add_argument("kernel", help=words)
    usual = inspect.signature(check_kernel).parameters
    shared.add(
        parser,
        ("--tokens", shared.count_of, "number of queries and of keys", usual["n_tokens"].default),
        ("--heads", shared.count_of, "query heads", usual["heads"].default),
        shared.KV_HEADS,
        ("--head-dim", shared.count_of, "dimension of a head", usual["head_dim"].default),
        ("--dtype", shared.dtype_of, f"one of {', '.join(shared.DTYPES)}", "float32"),
        ("--causal", bool, "test only causal calls, or only others (default: both)"),
        ("--forward-only", None, "leave the gradients out"),
        shared.DEVICE,
        shared.JSON,
    )


def load(name: str) -> Any:
    """The kernel of that name, or what ``module:name`` is, made a kernel if it is a function.

    Raises:
        ValueError: there is no such thing, or importing it would end the program.
        TypeError: it is neither a kernel nor a function.
    """
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec(module.partition(".")[0]) is None or module.endswith(".py"):
        raise ValueError(
            f"there is no module {module!r} here or installed: give module:function, without .py, "
            "from the folder where the module lies"
        )
    try:
        found: Any = importlib.import_module(module)
    except SystemExit as error:  # its status would be taken for a verdict
        raise ValueError(
            f"{module} ends the program while it is imported: put what it does as a script under "
            f'`if __name__ == "__main__":`'
        ) from error
    try:
        found = attrgetter(attribute)(found)
    except AttributeError:
        raise ValueError(f"{module} has no {attribute!r}") from None
    from quorum_attention.kernels import InnerKernel
    from quorum_attention.kernels.kit import from_lse_function

    # A class is one by mistake, which is said where it is used.
    if isinstance(found, InnerKernel) or InnerKernel in getattr(found, "__mro__", ()):
        return found
    if callable(found):
        return from_lse_function(found)
    raise TypeError(f"{name} is neither an inner kernel nor a function: {type(found).__name__}")


def _run(options: argparse.Namespace) -> int:
    try:
        result = check_kernel(
            load(options.kernel), n_tokens=options.tokens, heads=options.heads,
            kv_heads=options.kv_heads, head_dim=options.head_dim, dtype=options.dtype,
            is_causal=options.causal, backward=not options.forward_only,
            device=shared.default_device(options.device), progress=True,
        )  # fmt: skip
    except Exception as error:
        frames, ours = traceback.extract_tb(error.__traceback__), quorum_attention.__path__[0]
        if frames[-1].filename.startswith(ours):
            raise
        theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
        said = traceback.format_list(theirs) + traceback.format_exception_only(error)
        warn(f"{options.kernel} failed:\n{''.join(said).rstrip()}")
        return 2
    if options.json:
        print_json(result.to_dict())
    else:
        say(str(result))
    return 0 if result.exact else 1
