"""Attention from files to files, and tensors in files."""

from quorum_attention.files.formats import create_tensors, metadata_of, open_tensors

__all__ = ["create_tensors", "metadata_of", "open_tensors"]
