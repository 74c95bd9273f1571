"""One attention call on several devices of a machine, a worker process each."""

from quorum_attention.devices.pool import Pool
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.devices.shared_pools import close

__all__ = ["Pool", "PoolPass", "PoolReport", "close"]
