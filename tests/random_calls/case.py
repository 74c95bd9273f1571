"""One random call as plain data: everything that a seed decides, printable and
comparable."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Mask:
    """An attention mask.

    Attributes:
        kind: "bool", "float" (the inputs' dtype), "float32", "float64", or "half" (fp16
            beside bfloat16, else bfloat16).
        spans: which of (batch, heads, rows, columns) it spans; it broadcasts over the
            others.
        content: "random", "dead rows", "padding" (no key after some), "bias" (no -inf
            at all), "lowest" (the dtype's lowest number instead of -inf), "nothing"
            (keeps no pair), "alibi" (slopes times distances of far positions),
            "shifted" (rows up to 1e5 up or down).
        layout: "dense", "expanded", "sliced", "transposed", "permuted".
        dims: leading dimensions of size 1 are left out beyond so many.
    """

    kind: str
    spans: tuple[bool, bool, bool, bool]
    content: str = "random"
    layout: str = "dense"
    dims: int = 4


@dataclass(frozen=True)
class Rules:
    """Fields of the ``Mask`` that a call is given; its bias is the case's ``mask``.

    Attributes:
        causal, offset, window, chunk, softcap: its fields.
        documents: ids of queries and keys: "" (none), "scattered" (in any order),
            "runs", "two" (scattered ones of queries, others of keys).
        ids: how many ids there are.
        by_entry: whether each batch entry has its own documents and padding.
        lengths, padding, sinks: whether it has key_lengths, key_padding and sinks.
    """

    causal: str | bool = False
    offset: int | str | None = None
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    documents: str = ""
    ids: int = 2
    by_entry: bool = False
    lengths: bool = False
    padding: bool = False
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Scores:
    """What a kernel of ours does to scores besides scaling them; nothing by default."""

    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: bool = False


@dataclass(frozen=True)
class Orders:
    """How the call is cut.

    Attributes:
        how: "free" (nothing is said), "depth", "budget" (``room`` times the smallest
            that works) or "plan" (the other fields; ``pinned``: run as it is, else it
            may recover).
        passing: rows of a chunk or block of queries, and of keys, on the route
            ``passing``; its levels take over if that fails. None: another route.
    """

    how: str = "free"
    depth: int = 0
    room: float = 1.0
    levels: tuple[int, ...] = ()
    layout: str = "aligned"
    tile: int = 128
    n_cap: int | None = None
    accumulator: str | None = None
    one_group_of: int | None = None
    over_inputs: bool | None = None
    streams: int | None = None
    pinned: bool = True
    passing: tuple[int, int] | None = None


@dataclass(frozen=True)
class Results:
    """Where results go: preallocated (``given``) or not, of which dtypes (None: the
    inputs') and layout: "dense", "strided", "sliced", "token major", "pinned"."""

    given: bool = False
    out: str | None = None
    grads: str | None = None
    layout: str = "dense"


@dataclass(frozen=True)
class Case:
    """See the fields; sizes as in ``quorum_attention.attention``.

    Attributes:
        route: "autograd", "pair" (attention_with_lse, then attention_backward),
            "forward".
        layouts: of query, key, value and grad_out.
        content: of the inputs; ``grad`` of grad_out, in ``grad_dtype`` (None: the
            result's).
        requires_grad: which of query, key, value require a gradient ("autograd").
        failure: (pass, first, count): those allocations fail.
        residency: "device" or "host", where the accelerator's memory is another.
        reported: whether a report is filled.
        mask_grad: whether the gradient of the mask is asked for.
        lse_grad: the size of an upstream gradient of the log-sum-exp; None: there is
            none.
        dropout: chance of a probability to be dropped; the case's seed is the seed.
        without_lse: whether ``attention`` is called, which returns the output alone.
    """

    seed: int
    batch: tuple[int, ...] = (1,)
    heads: int = 1
    kv_heads: int = 1
    n_queries: int = 8
    n_keys: int = 8
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    is_causal: bool = False
    scale: float | None = None
    mask: Mask | None = None
    rules: Rules | None = None
    layouts: tuple[str, str, str, str] = ("plain", "plain", "plain", "plain")
    content: str = "normal"
    grad: str = "normal"
    grad_dtype: str | None = None
    route: str = "pair"
    requires_grad: tuple[bool, bool, bool] = (True, True, True)
    kernel: str = "auto"
    scores: Scores = field(default_factory=Scores)
    orders: Orders = field(default_factory=Orders)
    backward_orders: Orders | None = None
    results: Results = field(default_factory=Results)
    failure: tuple[str, int, int] | None = None
    residency: str = "device"
    reported: bool = True
    mask_grad: bool = False
    lse_grad: float | None = None
    dropout: float = 0.0
    without_lse: bool = False

    @property
    def pairs(self) -> int:
        """Score elements of the whole call."""
        return math.prod(self.batch) * self.heads * self.n_queries * self.n_keys

    def __str__(self) -> str:
        """Only what is not the default."""
        plain = Case(self.seed)
        said = [f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) !=
                getattr(plain, f.name)]  # fmt: skip
        return f"Case({', '.join([str(self.seed), *said])})"
