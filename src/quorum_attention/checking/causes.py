"""What can be wrong with a kernel: a name, a colon, and an explanation."""

from __future__ import annotations

INPUTS = "inputs: the kernel writes into the tensors it is handed"
REPEATABLE = (
    "not repeatable: the same call twice gives two results (dropout, noise, a counter, sums in an "
    "order that varies in 16 bits)"
)
STATE = (
    "state: a call gives what an earlier one of the same shape gave, or writes into what that one "
    "returned (something is kept between calls)"
)
STRIDES = (
    "strides: views that are not contiguous come out differently from copies of them (tensors are "
    "read as if they were contiguous)"
)
NOT_FINITE = "not a number: NaN or infinity where the scores are finite"
NO_KEYS = (
    "rows without a key: where every key of a rectangle is masked, lse has to be -inf, and neither "
    "out nor a gradient may become NaN"
)
VALUES = "values: the output is not the mean of the values by weights that do not depend on them"
BESIDE = (
    "something beside the keys: weights do not add up to one, so something else is counted in "
    "every call (a sink, padding); add it once, to the result, by its lse"
)
NORMALISATION = (
    "normalisation: weights do not add up to one; out has to be divided by the sum of the "
    "exponentials of this call's scores"
)
LSE = (
    "the log-sum-exp: weights are right, but lse is not the natural logarithm of the sum of the "
    "exponentials of exactly these scores (missing, in another base, of another head, rounded)"
)
POSITIONS = (
    "positions: they are taken within the task or the call, not in the whole sequence (ask for "
    "query_positions and key_positions, or use TaskTensors.task)"
)
LENGTH = (
    "length: what a pair weighs depends on how many other queries or keys a call has, or on which"
)
TWICE = "pairs counted more than once (the diagonal of a chunk belongs to the task that owns it)"
MISSING = "pairs left out (every pair of every rectangle of a task has to be computed)"
MERGE = (
    "merging: what the statistics or gradients held before a task is lost or changed (merge into "
    "the former, add to the latter)"
)
CAUSAL = (
    "causal calls: they are not the plain call without the keys after each query (query i of a "
    "square on the diagonal sees keys up to and with i, and scores them as a plain call does)"
)
HEADS = (
    "heads: a head comes out differently without the others (ask for head_indices, or use "
    "TaskTensors.first_head; heads are cut before tokens)"
)
BATCH = (
    "batch: an entry comes out differently without the others (ask for batch_indices, or use "
    "TaskTensors.entries)"
)
GROUPED = (
    "grouped heads: fewer key heads than query heads do not give what repeating every key head for "
    "its group gives (query head h uses key head h // group; gradients of a group add up)"
)
VALUE_DIM = "value width: a column of the output depends on how many columns the values have"
HEAD_DIM = "head dimension: columns of zeros, added to queries and keys, change the result"
KEYS = "other numbers of keys than of queries: the result changes with the cut"
SCALE = "scale: it is ignored, or applied otherwise than as one factor of query times key"
PRECISION = (
    "precision: results are rounded more coarsely than their dtype (something inside is computed "
    "or kept in fewer bits)"
)
REFERENCE = (
    "not attention: an uncut call is not softmax attention, and the kernel does not say so "
    "(own_attention = True)"
)
GRADIENT = "gradient: the backward of an uncut call is not the gradient of its forward"
GIVEN_LSE = (
    "the backward, given lse: it does not use the whole row's lse that it is handed (one of its "
    "own, of its own rectangle)"
)
GIVEN_OUT = (
    "the backward, given out: delta is not of the whole row's out that it is handed (one of its "
    "own, of its own rectangle; or, by autograd, an lse that carries no gradient)"
)
BACKWARD = "the backward: the forward is exact, the gradients of rectangles do not add up"
UNKNOWN = (
    "none of those that are looked for: its tasks are right one by one (which may be a fault of "
    "quorum_attention and not of the kernel: please report it)"
)


def in_backward(cause: str) -> str:
    """The same cause, seen in the gradients alone."""
    return f"the backward, {cause}"
