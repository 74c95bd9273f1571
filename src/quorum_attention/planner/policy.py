"""The planner's constants: which schedules are looked at, and when one is preferred.

The rates of a device are measured (``calibration.py``) or assumed (``rates.py``), and
the bytes and seconds of a pass are computed (``price.py``).
"""

from __future__ import annotations

from quorum_attention.decomposition.layouts import Pieces

# An uncut call shorter than this (seconds) is taken without looking further.
MIN_SECONDS_TO_SEARCH = 0.02
# A short call of at most this many bytes is run without asking how much memory is free:
# asking would take as long as the call.
MAX_BYTES_UNCHECKED = 768 << 20
# The same on a CPU: every machine has this much. (A CPU out of memory may kill the
# process, from which no plan recovers.)
MAX_CPU_BYTES_UNCHECKED = 64 << 20
# Lengths of small calls are rounded up to powers of two, and to at least this, before
# the calls are looked up.
MIN_ROUNDED_TOKENS = 16
# The share of the free memory that is left alone when no budget is given.
FREE_MEMORY_MARGIN = 0.1
# The memory of a CUDA device that is not available.
ASSUMED_DEVICE_BYTES = 80 << 30

# The chunks of a level come from quorums up to this size.
MAX_QUORUM_SIZE = 50
# A pinned depth up to MAX_LISTED_DEPTH is accepted at any length. Where nothing gets
# smaller, every level has DEEP_LEVEL_CHUNKS chunks.
MAX_LISTED_DEPTH = 3
DEEP_LEVEL_CHUNKS = 7
# A decomposition is looked at if its largest task has fewer tokens than this many times
# the largest task of any decomposition into fewer tasks.
MAX_TASK_GROWTH = 1.1
# The most tasks of one head group. Decompositions into more are refused, also if
# nothing else fits.
MAX_TASKS = 20_000_000
# All decompositions into at most MAX_TASKS_PRICED tasks are priced. Those into more
# tasks are priced until something has fit for ENOUGH_FITTING decompositions. Trimming
# takes time for each task, so fewer are priced where tasks are trimmed.
MAX_TASKS_PRICED = 2451
ENOUGH_FITTING = 16
MAX_TASKS_PRICED_TRIMMED = 60
ENOUGH_FITTING_TRIMMED = 6
# The most tasks of a decomposition that is trimmed for a plan (about 0.3 milliseconds a
# task).
MAX_TRIMMED_TASKS = 400
# Without a mask of the kernel's own, tasks are trimmed where queries and keys differ by
# at least this factor.
MIN_LENGTH_RATIO_TO_TRIM = 2

# The most chunks on the inputs as they lie: more of them only make more calls.
MAX_CHUNKS_IN_PLACE = 57
# The layouts of the rectangles of all tasks together that are tried: the larger, the
# better.
PIECES: tuple[Pieces, ...] = ("halves",)
# A device that does nothing beside compute, such as a CPU, loses little by small
# rectangles. Then more chunks make tight budgets possible.
FORWARD_PIECES_WITHOUT_OVERLAP: tuple[Pieces, ...] = ("halves", "rows", "blocks")
BACKWARD_PIECES_WITHOUT_OVERLAP: tuple[Pieces, ...] = ("halves", "blocks")
MAX_CHUNKS_WITHOUT_OVERLAP = 183
# The most query-key pairs of a rectangle under a bias with rows and columns.
MAX_BIAS_PAIRS = 32 << 20

# The rows of a chunk that stays on the device while others stream by, in waves of the
# device (one head group's together).
RESIDENT_WAVES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
# The parts of a chunk that a block may be which streams by, the largest first.
STREAMED_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 15, 16, 22, 24, 33)
# The unit of rows of a chunk or block, and the fewest rows of one.
TILE = 128
MIN_STREAMED_ROWS = 1024
# The rows of a wave where a device has no waves.
ASSUMED_WAVE_ROWS = 16_384
# The most times that blocks pass by chunks, all head groups together.
MAX_PASSAGES = 200_000

# A cut call must be predicted to take less than this share of the uncut call's time.
REQUIRED_TIME_SHARE = 0.95
# The first call's extra time counts for at most this share of the seconds: it decides
# between schedules that are about equally fast.
MAX_PREPARATION_SHARE = 0.02
# Another kernel than the preferred one must be predicted to take less than this share
# of its time: predictions for small tasks have been off by a quarter.
REQUIRED_TIME_SHARE_OF_KERNEL = 0.8
# A pass of fewer seconds is not worth building another kernel for.
MIN_SECONDS_TO_BUILD_KERNEL = 0.02
