"""``check_kernel``: tests whether an inner kernel is recovered exactly
(docs/kit.md)."""

from quorum_attention.checking.check import check_kernel
from quorum_attention.checking.result import CaseResult, CheckResult

__all__ = ["CaseResult", "CheckResult", "check_kernel"]
