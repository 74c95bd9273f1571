"""Chooses levels, head groups, slots, residency and kernel from a budget and a
shape."""

from quorum_attention.planner.estimate import Estimate, estimate, plan
from quorum_attention.planner.plan import Plan

__all__ = ["Estimate", "Plan", "estimate", "plan"]
