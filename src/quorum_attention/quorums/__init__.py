"""Interest sets: perfect cyclic difference sets. Plain integers, no torch."""

from quorum_attention.quorums.interest import (
    chunk_count,
    interest_set,
    is_interest_set,
    paired_interest_set,
    quorum_size,
    quorum_sizes,
)

__all__ = [
    "chunk_count",
    "interest_set",
    "is_interest_set",
    "paired_interest_set",
    "quorum_size",
    "quorum_sizes",
]
