"""Calls like one before: what was found out about that one is remembered, all of it at once.

To check a call and to decide how it runs takes some sixty functions of Python. That is little while
a processor's caches hold them; between two layers of a model they do not, and it is 0.3
milliseconds (docs/planner.md). So a call that asks for attention and nothing more is looked up
first, by everything that its checks and its decision depend on (``likeness.py``); one that is like
the last few on a CPU is told by less (``recent.py``). Two kinds of calls are remembered: small ones
on a CPU that torch's autograd records (``small.py``), and those that are one kernel call on a GPU,
or on a CPU with gradients that are ours (``whole.py``).

Nothing is remembered that holds a tensor, or a kernel that its user may let go.
"""

from quorum_attention.repeated.calls import output, repeat
from quorum_attention.repeated.likeness import like

__all__ = ["like", "output", "repeat"]
