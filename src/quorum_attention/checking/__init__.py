"""Is an inner kernel recovered exactly? ``check_kernel`` (docs/kit.md)."""

from quorum_attention.checking.check import CaseResult, CheckResult, check_kernel

__all__ = ["CaseResult", "CheckResult", "check_kernel"]
