"""Names of ``direct.py`` as they were, until their callers say the new ones."""

from quorum_attention.direct import DirectCall as Whole
from quorum_attention.direct import direct_call as whole

__all__ = ["Whole", "whole"]
