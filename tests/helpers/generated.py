"""How many tokens tests of models generate."""

from __future__ import annotations

import os

N_GENERATED = int(os.environ.get("QUORUM_ATTENTION_GENERATED", "12"))
"""Enough to cross windows of nine tokens; 64 and more by the variable."""
