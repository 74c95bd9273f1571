"""What can be wrong with a kernel: a name, a colon, and an explanation."""

STATE = (
    "state: the same call gives another result, or tensors that are handed over are written into "
    "(dropout, noise, a counter, a buffer that is kept, sums in an order that varies in 16 bits)"
)
LSE = (
    "the log-sum-exp: weights are right, but lse is not the natural logarithm of the sum of the "
    "exponentials of exactly these scores (missing, in another base, of another head, rounded)"
)
WEIGHTS = (
    "weights: the output is not the mean of the values by weights that add up to one (divide by "
    "the sum of the exponentials of this call's scores; add a sink once, to the result, by its lse)"
)
PAIRS = (
    "pairs: some are left out or counted twice (compute every pair of every rectangle once; merge "
    "into the statistics and add to the gradients that are handed over; query i of a causal square "
    "sees keys up to and with i)"
)
NO_KEYS = (
    "not finite: NaN or infinity; where every key of a rectangle is masked, lse has to be -inf, "
    "and neither out nor a gradient may become NaN"
)
POSITIONS = (
    "positions: what a pair weighs depends on its place in the task, or on how many others there "
    "are (ask for query_positions and key_positions, or use TaskTensors.task)"
)
HEADS = (
    "heads: a head or a batch entry comes out differently without the others, or with fewer key "
    "heads (ask for head_indices and batch_indices, or use TaskTensors.first_head and entries; "
    "query head h uses key head h // group, and gradients of a group add up)"
)
SIZES = (
    "sizes: views that are not contiguous, other scales, widths or numbers of keys come out "
    "differently (tensors are read as if they were contiguous, or padded with what counts)"
)
PRECISION = (
    "precision: results are rounded more coarsely than their dtype (something inside is computed "
    "or kept in fewer bits)"
)
BACKWARD = (
    "the backward: it is not the gradient of the forward, by the out and lse of whole rows that it "
    "is given (not those of its own rectangle), added to the gradients that are handed over"
)
UNKNOWN = (
    "none of those that are looked for: its tasks are right one by one (which may be a fault of "
    "quorum_attention and not of the kernel: please report it)"
)
