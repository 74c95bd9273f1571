"""Names of ``direct.py`` as they were, until their callers say the new ones."""

from quorum_attention.direct import cache_key as like

__all__ = ["like"]
