"""Names of what makes a training step smaller."""

from __future__ import annotations

ATTENTION = "quorum attention"
NORMS = "fused norms"
LOSS = "chunked loss"
MLP = "tiled MLP"
HOST = "checkpoints in host memory"
# In the order in which they cost least.
SWITCHES = (ATTENTION, NORMS, LOSS, MLP, HOST)
# Checkpoints switch these on themselves, where a layer does not fit otherwise.
TILES = "layers in tiles"
CHECKPOINTS = "checkpoints"
