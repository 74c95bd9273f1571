"""One attention call on several devices of a machine, a worker process each."""

from quorum_attention.pool.pool import Pool, close
from quorum_attention.pool.report import PoolPass, PoolReport

__all__ = ["Pool", "PoolPass", "PoolReport", "close"]
