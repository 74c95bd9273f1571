"""Attention over a sequence that is sharded over the ranks of a ``torch.distributed`` group."""

from quorum_attention.distributed.attention import attention
from quorum_attention.distributed.report import ShardedReport

__all__ = ["ShardedReport", "attention"]
