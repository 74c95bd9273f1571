"""What the planner takes for granted: which cuts are worth a look, and when another is better.

Numbers, and why they are what they are; what a device can do is measured (``calibration.py``) and
what a pass takes is reckoned (``cost.py``, ``footprint.py``).
"""

from __future__ import annotations

# --- Which calls are not worth a search -------------------------------------------------------

# A monolithic call shorter than this (seconds) is taken without looking further.
WORTH_COMPARING = 0.02
# Such a short call of fewer bytes than this is run without asking what is free, which would take
# as long as the call.
SHORT_BYTES = 256 << 20
# On a CPU a call of fewer is run whole: what no machine is short of. (A failed allocation is
# planned for; a killed process not.)
WHOLE_BYTES = 64 << 20
# Lengths of such calls are rounded up to powers of two, from this on, before they are asked about.
SHORTEST = 16
# Of what is free, this much is left alone when no budget is given.
MARGIN = 0.1

# --- Which cuts are looked at -----------------------------------------------------------------

# Single levels up to this quorum size; every pair and a few triples of small ones.
LARGEST_SINGLE = 50
PAIRED = (3, 4, 5, 6, 8)
TRIPLES = ((7, 7, 7), (13, 7, 7), (13, 13, 7), (13, 13, 13))
# Levels of the deepest of these: so many are run whatever the length, to no harm.
LISTED = 3
# What a greater depth than theirs is made of.
DEEP = 7
# Where none of these fits: every cut into at most so many tasks. Of those that fit, so many are
# priced, from few tasks to many.
MOST_TASKS = 20_000_000
PRICED_DEEP = 16
# Tasks of two chunks in three hold two thirds of the tokens: of use only where all run at once, or
# in place, or where a mask leaves less of them.
FEWEST = (3,)
# More chunks than this only make more calls of a sweep.
MOST_SWEPT = 57
# The bias of one rectangle under a mask that spans rows and columns, in pairs.
MASKED_PAIRS = 32 << 20

# --- Trimmed tasks ----------------------------------------------------------------------------

# Tasks of a decomposition that are trimmed for a plan, about 0.3 milliseconds each: up to the first
# of these; up to the next as long as nothing fits, or only more than so many untrimmed ones do.
MOST_TRIMMED = (60, 400, 4000)
# Under a mask a token is in about one task however many there are, so few cuts are worth a look.
TRIMMED_SINGLE = (2, 3, 4, 5, 6, 8, 10)
# Without a mask only this much fewer queries than keys, or keys than queries, are.
LOPSIDED = 2

# --- Which of two is taken --------------------------------------------------------------------

# A decomposed call has to be predicted this much faster than the monolithic one.
CLEARLY = 0.95
# Of plans about equally fast the one whose shapes are prepared sooner: it counts up to this share.
FIRST_CALL_COUNTS = 0.02
# Another kernel than the preferred one has to be this much faster: predictions for small tasks have
# been a quarter off.
CLEARLY_ANOTHER_KERNEL = 0.8
# What takes less (seconds) is not worth building another kernel for.
WORTH_BUILDING = 0.02

# --- Assumed where nothing is known -----------------------------------------------------------

# Of a CUDA device that is not there to be asked.
ASSUMED_DEVICE_BYTES = 80 << 30
