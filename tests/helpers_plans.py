"""Plans that tests need and users do not."""

from __future__ import annotations

from dataclasses import replace

import quorum_attention as qa


def unpinned(plan: qa.Plan) -> qa.Plan:
    """The plan with its decomposition, but free to recover from running out of memory."""
    schedule = replace(plan.schedule, pinned=False)
    return replace(plan, candidate=replace(plan.candidate, schedule=schedule))
