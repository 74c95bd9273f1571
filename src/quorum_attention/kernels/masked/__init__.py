"""Attention under a ``Mask``: its geometry, and the kernel that runs it on another
one."""
