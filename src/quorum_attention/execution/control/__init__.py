"""Decides which unit runs next and how to recover from failures; no tensors, no
devices."""
