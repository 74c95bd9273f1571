"""Task farms: attention calls larger than a machine, by workers of a Ray cluster."""

from quorum_attention.farm.cluster import Workers
from quorum_attention.farm.farm import Farm

__all__ = ["Farm", "Workers"]
