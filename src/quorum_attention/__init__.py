"""Quorum Attention: scaled dot-product attention that never runs out of memory.

An attention call that does not fit is cut by a cyclic quorum set into independent
subsequence tasks that do; each runs on an ordinary attention kernel, and their softmax
statistics recombine exactly, forward and backward. See ``attention``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorum_attention.api import (
        attention,
        attention_backward,
        attention_with_lse,
        native_attention,
    )
    from quorum_attention.call.settings import using
    from quorum_attention.checking import check_kernel
    from quorum_attention.errors import BudgetError, OutOfMemoryError
    from quorum_attention.execution.report import Report
    from quorum_attention.flex import patched_flex_attention
    from quorum_attention.kernels import InnerKernel, kernels, register_kernel
    from quorum_attention.kernels.kit import (
        LongNetKernel,
        from_lse_function,
        from_score_mod,
    )
    from quorum_attention.kernels.native import NativeKernel
    from quorum_attention.mask import Mask
    from quorum_attention.planner import Plan, estimate, plan
    from quorum_attention.planner.calibration import calibrate
    from quorum_attention.quorums import (
        interest_set,
        is_interest_set,
        paired_interest_set,
        quorum_sizes,
    )
    from quorum_attention.sdpa import patch_sdpa, patched_sdpa, unpatch_sdpa

__version__ = "0.1.0"

# Loaded on first use, so that quorums and decomposition can be imported without torch.
_NAMES: dict[str, tuple[str, ...]] = {
    "api": (
        "attention",
        "attention_backward",
        "attention_with_lse",
        "native_attention",
    ),
    "errors": ("BudgetError", "OutOfMemoryError"),
    "execution.report": ("Report",),
    "flex": ("patched_flex_attention",),
    "kernels": ("InnerKernel", "kernels", "register_kernel"),
    "kernels.native": ("NativeKernel",),
    "kernels.kit": ("LongNetKernel", "from_lse_function", "from_score_mod"),
    "mask": ("Mask",),
    "checking": ("check_kernel",),
    "planner": ("Plan", "estimate", "plan"),
    "planner.calibration": ("calibrate",),
    "quorums": (
        "interest_set",
        "is_interest_set",
        "paired_interest_set",
        "quorum_sizes",
    ),
    "sdpa": ("patch_sdpa", "patched_sdpa", "unpatch_sdpa"),
    "call.settings": ("using",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "BudgetError",
    "InnerKernel",
    "LongNetKernel",
    "Mask",
    "NativeKernel",
    "OutOfMemoryError",
    "Plan",
    "Report",
    "attention",
    "attention_backward",
    "attention_with_lse",
    "calibrate",
    "check_kernel",
    "estimate",
    "from_lse_function",
    "from_score_mod",
    "interest_set",
    "is_interest_set",
    "kernels",
    "native_attention",
    "paired_interest_set",
    "patch_sdpa",
    "patched_flex_attention",
    "patched_sdpa",
    "plan",
    "quorum_sizes",
    "register_kernel",
    "unpatch_sdpa",
    "using",
]


# Subpackages that users reach by name, as in
# ``quorum_attention.distributed.attention``.
_SUBPACKAGES = ("devices", "distributed", "integrations", "recipes")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES[name]}")
    # ``kernels`` is the name of a subpackage too; that one is callable, and serves as
    # the function.
    value = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES, "__version__"])
