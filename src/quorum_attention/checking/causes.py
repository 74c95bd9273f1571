"""What can be wrong with a kernel: a name, a colon, and an explanation."""

STATE = (
    "state: a repeated call gives another result, or the kernel writes to its inputs (dropout, "
    "noise, a counter, a reused buffer, 16-bit sums in an order that varies)"
)
LSE = (
    "the log-sum-exp: weights are right, but lse is not log(sum(exp(score))) of the same scores "
    "(missing, in another base, of another head, or rounded)"
)
WEIGHTS = (
    "weights: the weights of a row do not add up to one (divide by the sum of the exponentials of "
    "this call's scores; add a sink once, to the result, by its lse)"
)
PAIRS = (
    "pairs: some pairs are left out or counted twice (compute each pair of each rectangle once; "
    "merge into the statistics and add to the gradients that the kernel is given; query i of a "
    "causal square sees keys 0 to i)"
)
NO_KEYS = (
    "not finite: a result is NaN or infinite (in a row whose keys are all masked lse must be -inf, "
    "and neither out nor gradients may be NaN)"
)
POSITIONS = (
    "positions: the weight of a pair depends on its place in the task, or on the task's length "
    "(take query_positions and key_positions as parameters, or use TaskTensors.task)"
)
HEADS = (
    "heads: a head or a batch entry has another result without the others, or with fewer key heads "
    "(take head_indices and batch_indices as parameters, or use TaskTensors.first_head, entries; "
    "query head h uses key head h // group, and gradients of a group add up)"
)
SIZES = (
    "sizes: results are wrong for views that are not contiguous, or for other scales, widths or "
    "numbers of keys (tensors are read as if contiguous, or padding takes part)"
)
PRECISION = (
    "precision: results have fewer bits than their dtype (something inside is computed or stored "
    "in a shorter one)"
)
BACKWARD = (
    "the backward: it is not the gradient of the forward (use the given out and lse, which are "
    "those of whole rows, not of a rectangle; add to the given gradients)"
)
UNKNOWN = (
    "unknown: each task is right by itself (the fault may be quorum_attention's and not the "
    "kernel's: please report it)"
)
