"""The planner's constants: which decompositions are looked at, and when one is preferred.

The rates of a device are measured (``calibration.py``), and the bytes and seconds of a pass are
computed (``price.py``).
"""

from __future__ import annotations

from quorum_attention.decomposition.layouts import Pieces

# --- Which calls are not worth a search -------------------------------------------------------

# A monolithic call shorter than this (seconds) is taken without looking further.
MIN_SECONDS_TO_SEARCH = 0.02
# A short call of fewer bytes than this is run without asking how much memory is free: asking would
# take as long as the call.
MAX_BYTES_UNCHECKED = 256 << 20
# On a CPU a call of at most so many bytes is run whole: every machine has that much. (A CPU out of
# memory may kill the process, from which no plan recovers.)
MAX_CPU_BYTES_UNCHECKED = 64 << 20
# Lengths of small calls are rounded up to powers of two, and to at least this, before they are
# looked up.
MIN_ROUNDED_TOKENS = 16
# Share of the free memory that is left alone when no budget is given.
FREE_MEMORY_MARGIN = 0.1

# --- Which cuts are looked at -----------------------------------------------------------------

# Chunks of a level come from quorums up to this size.
MAX_QUORUM_SIZE = 50
# A pinned depth up to MAX_LISTED_DEPTH is accepted at any length. Where nothing gets smaller, every
# level has DEEP_LEVEL_CHUNKS chunks.
MAX_LISTED_DEPTH = 3
DEEP_LEVEL_CHUNKS = 7
# A decomposition is looked at if its largest task has fewer tokens than this many times the largest
# task of any decomposition into fewer tasks.
MIN_SHRINK = 1.1
MAX_TASKS = 20_000_000
# All decompositions into at most MAX_TASKS_PRICED tasks are priced, and then more until
# one that fits was known at ENOUGH_FITTING of them. Trimming takes time for each task.
MAX_TASKS_PRICED = 2451
ENOUGH_FITTING = 16
MAX_TASKS_PRICED_TRIMMED = 60
ENOUGH_FITTING_TRIMMED = 6
# The most chunks on the inputs as they lie: more of them only make more calls.
MAX_CHUNKS_IN_PLACE = 57
# How the rectangles of all tasks together are laid out: the larger, the better. A device that does
# nothing beside compute, as a CPU, loses little by small ones (forward; backward), and then more
# chunks make tight budgets possible.
PIECES: tuple[Pieces, ...] = ("halves",)
FORWARD_PIECES_WITHOUT_OVERLAP: tuple[Pieces, ...] = ("halves", "rows", "blocks")
BACKWARD_PIECES_WITHOUT_OVERLAP: tuple[Pieces, ...] = ("halves", "blocks")
MAX_SMALL_PIECES_CHUNKS = 183
# The most query-key pairs of a rectangle under a mask with rows and columns: the size of its bias.
MAX_BIAS_PAIRS = 32 << 20

# --- Trimmed tasks ----------------------------------------------------------------------------

# The most tasks of a decomposition that is trimmed for a plan (about 0.3 milliseconds a task).
MAX_TRIMMED_TASKS = 400
# Without such a mask, tasks are trimmed where queries and keys differ by at least this factor.
MIN_LENGTH_RATIO_TO_TRIM = 2

# --- Rows that stay while others pass by -------------------------------------------------------

# Rows of a chunk that stays, in waves of the device (one head group's together), and the parts of
# a chunk that a passing block may be, the largest first.
RESIDENT_WAVES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
STREAMED_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 15, 16, 22, 24, 33)
# Multiples of rows, and the fewest of a chunk or block.
TILE = 128
MIN_STREAMED_ROWS = 1024
# Where a device has no waves.
ASSUMED_WAVE_ROWS = 16_384
# Most times that blocks pass by chunks, all head groups together.
MAX_PASSAGES = 200_000

# --- Which of two is taken --------------------------------------------------------------------

# A decomposed call must be predicted to take less than this share of the monolithic call's time.
REQUIRED_TIME_SHARE = 0.95
# Rows that pass by are not looked at where tasks take less than so many times the arithmetic alone.
MIN_TIME_OVER_ARITHMETIC = 1.03
# The first call's extra time counts for at most this share of the seconds: it decides between
# schedules that are about equally fast.
MAX_PREPARATION_SHARE = 0.02
# Another kernel than the preferred one must be predicted to take less than this share of its time:
# predictions for small tasks have been off by a quarter.
REQUIRED_TIME_SHARE_OF_KERNEL = 0.8
# A pass of fewer seconds is not worth building another kernel for.
MIN_SECONDS_TO_BUILD_KERNEL = 0.02

# --- Assumed where nothing is known -----------------------------------------------------------

# Memory of a CUDA device that is not available.
ASSUMED_DEVICE_BYTES = 80 << 30
