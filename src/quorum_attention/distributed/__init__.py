"""Attention over a sequence that is sharded over the ranks of a ``torch.distributed``
group."""

from quorum_attention.distributed.attention import attention
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.torch_context import context_parallel

__all__ = ["ShardedReport", "attention", "context_parallel"]
