"""Is an inner kernel recovered exactly? ``check_kernel`` (docs/kit.md)."""

from quorum_attention.checking.check import check_kernel
from quorum_attention.checking.laws import Broken
from quorum_attention.checking.result import CaseResult, CheckResult

__all__ = ["Broken", "CaseResult", "CheckResult", "check_kernel"]
