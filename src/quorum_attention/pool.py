"""``devices`` by its older name."""

from quorum_attention.devices import Pool, PoolPass, PoolReport, close

__all__ = ["Pool", "PoolPass", "PoolReport", "close"]
