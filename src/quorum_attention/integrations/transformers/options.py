"""How the attention calls of a model are made: what ``register`` was given.

Raises:
    ImportError: Transformers is not installed, or is a version that this was not
        written for.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import shown, whole_number
from quorum_attention.call.options import CallOptions
from quorum_attention.call.options import check_options as check_call_options
from quorum_attention.distributed import ShardedReport
from quorum_attention.execution.report import Report
from quorum_attention.extras import install_hint, installed_version
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.plain_types import Keywords
from quorum_attention.units import check_budget

# From 5.6 on masks are described by lengths and offsets; before, by a tensor of
# positions.
_OLDEST = (5, 6)
_NEXT = (6, 0)
_installed = installed_version("transformers") or "none"
_numbers = re.match(r"(\d+)\.(\d+)", _installed)
if _numbers is None or not _OLDEST <= (int(_numbers[1]), int(_numbers[2])) < _NEXT:
    raise ImportError(
        "this needs Hugging Face Transformers 5.6 or later, before 6; installed is "
        f"{_installed}: {install_hint('transformers')}"
    )

# Shorter calls take so little that a plan of any kind costs more than it saves.
_MIN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class GroupReference:
    """A weak reference to a group, out of sight of torch's compiler: it looks through
    plain ones among the arguments of what is registered, and keeps what it finds for
    good."""

    group: weakref.ref[dist.ProcessGroup]


@dataclass(frozen=True)
class ModelOptions:
    """The options of ``attention`` for every call of a model, and which calls it gets.

    Attributes:
        budget, kernel, depth, accumulator, report: as in ``attention``.
        min_tokens: calls of fewer queries go to SDPA if their mask is none, or a causal
            square; None: 1,024, or 0 where a budget, a kernel or a depth is given.
        group: over whose ranks the sequence is sharded; None: over none.
        ignore: keywords that models give their attention, and that change no result.
    """

    budget: int | str | None = None
    kernel: str | InnerKernel = "auto"
    depth: int | str = "auto"
    accumulator: str = "auto"
    report: Report | ShardedReport | None = None
    min_tokens: int | None = None
    group: GroupReference | None = None
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options here: the first call may be hours after ``register``."""
        call_options = CallOptions(
            self.budget, None, self.depth, accumulator=self.accumulator
        )
        check_call_options(call_options, torch.device("cpu"))
        check_budget(self.budget)
        if self.kernel != "auto":
            get_kernel(self.kernel)
        if self.min_tokens is not None:
            whole_number(self.min_tokens, "min_tokens", 0)
        kind: type = Report if self.group is None else ShardedReport
        if self.report is not None and not isinstance(self.report, kind):
            raise TypeError(
                f"report must be a {kind.__name__} or None, got {shown(self.report)}"
            )
        if self.group is not None and (
            self.accumulator != "auto" or self.min_tokens is not None
        ):
            raise ValueError("accumulator and min_tokens cannot be given with group")
        if not isinstance(self.ignore, tuple) or not all(
            isinstance(n, str) for n in self.ignore
        ):
            raise TypeError(
                f"ignore must be a tuple of names, got {shown(self.ignore)}"
            )

    @property
    def shortest(self) -> int:
        """Queries from which on a simple call is ours."""
        if self.min_tokens is not None:
            return self.min_tokens
        is_plain = (
            self.budget is None and self.kernel == "auto" and self.depth == "auto"
        )
        return _MIN_TOKENS if is_plain and self.group is None else 0

    def of_call(self) -> Keywords:
        """Keyword arguments of ``attention``, or of ``distributed.attention``."""
        options = {
            "budget": self.budget,
            "kernel": self.kernel,
            "depth": self.depth,
            "report": self.report,
        }
        if self.group is None:
            options["accumulator"] = self.accumulator
        return options


def options_of(name: str) -> ModelOptions | None:
    """The options that ``register`` was given for a name; None: it is somebody
    else's."""
    from transformers import AttentionInterface

    # ``register`` gives Transformers a ``functools.partial`` that begins with the
    # options.
    arguments = getattr(AttentionInterface().get(name), "args", ())
    if arguments and isinstance(arguments[0], ModelOptions):
        return arguments[0]
    return None
