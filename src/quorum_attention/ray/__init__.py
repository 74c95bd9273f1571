"""Calls larger than a machine, from files to files, by the tasks of a Ray cluster."""

from quorum_attention.ray.farm import Farm

__all__ = ["Farm"]
