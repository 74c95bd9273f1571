"""A case of a seed. Corners are drawn far more often than chance would have them.

On a GPU nearly every free case meets something that no other has: Triton compiles a kernel for each
dtype, width and option, and again for each pattern of strides and addresses that are multiples of
16. That takes 0.3 to 3 s a call, all else some hundredths. So on a GPU ``BLOCK`` neighbouring seeds
share what is compiled for; everything else is drawn as freely as ever.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from random_calls.case import Case, Mask, Orders, Planted, Results, Scores

BLOCK = 16
_CORNERS = (
    *range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, *range(125, 131), *range(249, 260),
)  # fmt: skip
_LONGER = (*range(380, 388), *range(505, 515), 640, 767, 768, 769)
_LONG = (*range(1008, 1027), 1151, 1280)
# The more tasks, the rarer.
_LEVELS: dict[tuple[int, ...], float] = {
    (): 4, (1,): 6, (3,): 8, (7,): 8, (13,): 3, (21,): 1.5, (31,): 1.5, (3, 3): 4, (7, 3): 1.5,
    (7, 7): 0.7, (1, 7): 1.5, (3, 1): 1.5, (1, 1): 1, (1, 3): 1.5, (3, 3, 3): 0.7, (13, 3): 0.5,
    (3, 7): 1,
}  # fmt: skip
_CPU_KERNELS = {
    "auto": 60, "cpu": 10, "dense": 10, "function": 3, "function explicit": 2, "scores": 5,
    "native": 0.005, "native scores": 0.005,
}  # fmt: skip
_CUDA_KERNELS = {
    "auto": 10, "cudnn": 2, "flash": 16, "efficient": 20, "native": 16, "dense": 8,
    "function": 3, "function explicit": 1, "native scores": 3,
}  # fmt: skip
_PLAIN = ("auto", "cpu", "dense", "native", "fa4", "cudnn", "flash", "efficient")
# Vendors' operators, which take rectangles wherever they are: rows may pass by.
_PASSING = ("auto", "cpu", "fa4", "cudnn", "flash", "efficient")
_ROWS = (1, 7, 16, 33, 64, 100, 128, 256)
_MOST_PAIRS = 150_000
_MOST_UNITS = 64
_LAYOUTS = {
    "plain": 8, "token major": 3, "sliced": 2, "offset": 1, "expanded heads": 1,
    "expanded batch": 0.7, "expanded rows": 0.5, "every other element": 0.7, "transposed": 0.7,
    "packed": 1, "array": 0.3,
}  # fmt: skip


def draw(
    seed: int, device: str = "cpu", *, failing: bool = False, kernel: str | None = None
) -> Case:
    """The case of a seed; of a kind of device, because kernels differ.

    Args:
        failing: allocations of every call fail, not of one in forty.
        kernel: on a GPU: calls of this kernel alone.
    """
    return _Drawing(seed, device, failing, kernel).case()


class _Drawing:
    def __init__(self, seed: int, device: str, failing: bool, kernel: str | None) -> None:
        self.seed, self.failing, self.kernel = seed, failing, kernel
        self.on_cuda = device != "cpu"
        self.r = random.Random(seed)
        # What all of some neighbouring seeds draw alike.
        self.shared = random.Random(f"kind {seed // BLOCK}") if self.on_cuda else self.r
        # Kernels are tried out for every head dimension they meet: some at a time.
        self.odd_widths = random.Random(seed // 1000).sample(range(1, 81), 5)

    def one_of(self, weights: dict[Any, float]) -> Any:
        return self.r.choices(list(weights), list(weights.values()))[0]

    def sometimes(self, chance: float) -> bool:
        return self.r.random() < chance

    def tokens(self) -> int:
        where = self.one_of(
            {"any": 40, "few": 22, "corner": 28, "longer": 4, "long": 1.2, "very long": 0.15}
        )
        r = self.r
        return {
            "any": lambda: r.randint(1, 300),
            "few": lambda: r.randint(1, 40),
            "corner": lambda: r.choice(_CORNERS),
            "longer": lambda: r.choice(_LONGER),
            "long": lambda: r.choice(_LONG),
            "very long": lambda: r.randint(1100, 2000),
        }[where]()

    def lengths(self) -> tuple[int, int]:
        n = self.tokens()
        kind = self.one_of(
            {"equal": 62, "few keys": 12, "few queries": 8, "apart": 16, "nothing": 1}
        )
        other = {
            "equal": lambda: n,
            "few keys": lambda: self.r.randint(1, 5),
            "few queries": lambda: self.r.randint(1, 5),
            "apart": self.tokens,
            "nothing": lambda: 0,
        }[kind]()
        if kind == "few queries" or (kind == "nothing" and self.sometimes(0.5)):
            return other, n
        return n, other

    def case(self) -> Case:
        r = self.r
        n_queries, n_keys = self.lengths()
        long = max(n_queries, n_keys)
        batch, heads, kv_heads = self.sizes(n_queries, n_keys)
        self.r = self.shared
        head_dim = self.width(long)
        kernel = self.kernel or self.one_of(_CUDA_KERNELS if self.on_cuda else _CPU_KERNELS)
        interpreted = "native" in kernel and not self.on_cuda
        if interpreted:
            n_queries, n_keys, head_dim = min(n_queries, 20), min(n_keys, 20), min(head_dim, 16)
            batch, heads, kv_heads = (1,), min(heads, 2), 1
        value_dim = head_dim if self.sometimes(0.9 if self.on_cuda else 0.8) else self.width(long)
        dtype = self.one_of({"float16": 38, "bfloat16": 20, "float32": 34, "float64": 8})
        if interpreted:
            dtype = r.choice(["float16", "float32"])
        if kernel == "fa4":
            dtype = self.shared.choice(["float16", "bfloat16"])
            head_dim, value_dim = self.shared.choice([(64, 64), (128, 128), (96, 96), (192, 128)])
        scores = self.scores(kernel)
        plain = kernel in _PLAIN
        masked = self.sometimes(0.27) and plain
        self.r = r
        mask = self.mask() if masked and kernel != "fa4" else None
        route = self.one_of({"autograd": 45, "pair": 45, "forward": 10})
        is_causal = self.sometimes(0.55)
        if self.failing:
            route = "pair"
        content = self.one_of(
            {"normal": 42, "sink": 14, "sinks": 4, "one hot": 12, "large scores": 7, "tiny": 4,
             "constant": 4, "extremes": 3, "offset values": 5, "spread rows": 5}
        )  # fmt: skip
        planted = None
        if self.sometimes(0.05) and plain:
            planted = Planted(
                self.one_of({"nan": 2, "inf": 1, "-inf": 1}),
                self.one_of({"query": 4, "key": 2, "value": 2, "grad_out": 2}),
                self.sometimes(0.5),
            )
        results = self.results(route, dtype)
        grad, grad_dtype = self.gradient(route, dtype, results)
        if dtype == "float16" and not plain:  # a function of the user's rounds its gradients itself
            grad = "normal" if grad in ("wide range", "loss scaled") else grad
            content = "normal" if content == "extremes" else content
        if planted is not None and grad in ("wide range", "loss scaled"):
            grad = "normal"  # what overflows is not told from what is not finite anyhow
        sizes = (heads // kv_heads, kv_heads, kv_heads * math.prod(batch))
        orders = self.orders(*sizes)
        again = self.orders(*sizes) if route == "pair" and self.sometimes(0.4) else None
        layouts = self.layouts()
        failure = None
        fails = self.sometimes(0.06) or self.failing
        if fails and route == "pair" and not interpreted:
            failure = (
                r.choice(["forward", "backward"]), r.choice([*range(1, 12), r.randint(12, 90)]),
                r.choice([1, 1, 1, 2, 3]),
            )  # fmt: skip
        scale = self.scale(head_dim)
        wanted = self.wanted()
        calibrated = r.choice([0.001, 0.03, 1.0, 30.0]) if self.sometimes(0.15) else None
        residency = r.choice(["device", "host"])
        reported, looked_after = self.sometimes(0.7), self.sometimes(0.03)
        measured = failure is None and self.sometimes(0.003)
        mask_grad, lse_grad = self.more_gradients(
            mask, plain and planted is None and route != "forward" and not measured,
            route == "autograd", orders if again is None else again,
        )  # fmt: skip
        found = Case(
            self.seed, batch, heads, kv_heads, n_queries, n_keys, head_dim, value_dim, dtype,
            is_causal, scale, mask, layouts, content, planted, grad, grad_dtype, route, wanted,
            kernel, scores, orders, again, results, failure, calibrated, residency, reported,
            looked_after, measured, mask_grad, lse_grad,
            # Last, so that a seed's other choices do not depend on it.
            0.0 if mask_grad or lse_grad else self.dropout(kernel, planted, content, grad),
        )  # fmt: skip
        if route != "pair" and lse_grad is None:
            found = replace(found, without_lse=self.sometimes(0.5))
        found = self.passing(found)
        return _few_strides(found) if self.on_cuda and "native" in kernel else found

    def passing(self, case: Case) -> Case:
        """The case, some of its cut passes on the route ``passing``."""
        rows = [
            (self.r.choice(_ROWS), self.r.choice(_ROWS)) if self.sometimes(0.25) else None
            for _ in range(2)
        ]
        both = (case.orders, case.backward_orders)
        if case.kernel not in _PASSING or case.mask is not None:
            return case
        # Not too many launches: a head's pairs are in some 36 rectangles at most.
        least = -(-case.n_queries // 6), -(-case.n_keys // 6)
        by = [
            orders
            if orders is None or not orders.levels or one is None
            else replace(orders, passing=(max(one[0], least[0]), max(one[1], least[1])))
            for orders, one in zip(both, rows, strict=True)
        ]
        if both == (by[0], by[1]):
            return case
        # On a GPU it is for rows in host memory. Nothing but what is multiplied can pass by.
        return replace(
            case, orders=by[0], backward_orders=by[1], dropout=0.0, lse_grad=None,
            residency="host" if self.on_cuda else case.residency,
        )  # fmt: skip

    def sizes(self, n_queries: int, n_keys: int) -> tuple[tuple[int, ...], int, int]:
        """A batch's shape, query heads and key heads."""
        batch, heads, kv_heads = self.heads(max(n_queries, n_keys))
        # A few milliseconds a call: fewer of them at once where sequences are longer.
        while math.prod(batch) * heads * n_queries * n_keys > _MOST_PAIRS and heads > 1:
            kv_heads = max(1, kv_heads // 2)
            heads = kv_heads * self.one_of({1: 2, 2: 1}) if kv_heads > 1 else 1
            batch = (1,) if math.prod(batch) > 1 else batch
        return batch, heads, kv_heads

    def layouts(self) -> tuple[str, str, str, str]:
        def one() -> str:
            return "plain" if self.sometimes(0.35) else self.one_of(_LAYOUTS)

        return one(), one(), one(), one()

    def more_gradients(
        self, mask: Mask | None, allowed: bool, by_autograd: bool, orders: Orders
    ) -> tuple[bool, float | None]:
        """Whether the mask's gradient is asked for, and the size of one of the log-sum-exp."""
        of_mask = mask is not None and mask.kind != "bool" and self.sometimes(0.6)
        size = self.one_of({None: 80, 1.0: 14, 30.0: 3, 1e-3: 3})
        # Neither a forward nor a plan knows of the columns that carry it.
        if (by_autograd and orders.how == "budget") or (orders.how == "plan" and not orders.pinned):
            size = None
        return of_mask and allowed, size if allowed else None

    def dropout(self, kernel: str, planted: Planted | None, content: str, grad: str) -> float:
        has_it = kernel in ("auto", "cpu", "dense", "native") and planted is None
        # Ten times the largest numbers of a dtype are none.
        fits = content != "extremes" and grad not in ("wide range", "loss scaled")
        return self.r.choice([0.05, 0.3, 0.9]) if has_it and fits and self.sometimes(0.08) else 0.0

    def heads(self, long: int) -> tuple[tuple[int, ...], int, int]:
        if long > 600:
            return (1,), 1, 1
        batch = self.one_of(
            {(1,): 55, (): 10, (2,): 16, (3,): 5, (1, 2): 3, (2, 2): 2, (2, 1): 2, (0,): 0.7}
        )
        kv_heads = self.one_of({1: 40, 2: 40, 3: 10, 4: 5})
        shared = self.one_of({1: 66, 2: 20, 3: 6, 4: 6})
        if long > 260:
            batch = batch if math.prod(batch) <= 1 else (1,)
            kv_heads, shared = min(kv_heads, 2), min(shared, 2)
        return batch, kv_heads * shared, kv_heads

    def width(self, long: int) -> int:
        if self.on_cuda:
            # Every one is compiled for: a few, and all kinds among them.
            return self.one_of({16: 3, 64: 5, 128: 1, 8: 1, 73: 1, 40: 0.5, 257: 0.2})
        kind = self.one_of({"any": 35, "usual": 52, "128": 4, "odd": 4, "257": 2, "one": 3})
        found = {
            "any": lambda: self.r.choice(self.odd_widths),
            "usual": lambda: self.r.choice([4, 8, 16, 32, 64]),
            "128": lambda: 128,
            "odd": lambda: self.r.choice([72, 80, 96, 192]),
            "257": lambda: 257,
            "one": lambda: 1,
        }[kind]()
        return found if long <= 600 else min(found, 64)

    def scale(self, head_dim: int) -> float | None:
        kind = self.one_of(
            {"default": 68, "positive": 12, "negative": 9, "zero": 4, "large": 4, "tiny": 3}
        )
        usual = head_dim**-0.5
        return {
            "default": lambda: None,
            "positive": lambda: usual * self.r.uniform(0.1, 3),
            "negative": lambda: -usual * self.r.uniform(0.1, 3),
            "zero": lambda: 0.0,
            "large": lambda: self.r.choice([5.0, -5.0, 30.0]),
            "tiny": lambda: self.r.choice([1e-6, -1e-6]),
        }[kind]()

    def scores(self, kernel: str) -> Scores:
        if "scores" not in kernel:
            return Scores()
        r = self.r
        found = Scores(
            window=r.choice([(0, 0), (5, 0), (20, 20), (40, 0), (0, 30), (3, 1)])
            if self.sometimes(0.6)
            else None,
            softcap=r.choice([2.0, 50.0]) if self.sometimes(0.4) else None,
            alibi=self.sometimes(0.4),
        )
        return found if found != Scores() else Scores(softcap=2.0)

    def mask(self) -> Mask:
        spans = (
            self.sometimes(0.3), self.sometimes(0.4), self.sometimes(0.75), self.sometimes(0.85),
        )  # fmt: skip
        kind = self.one_of({"bool": 5, "float": 5, "float32": 1})
        content = self.one_of(
            {"random": 4, "dead rows": 4, "padding": 2, "bias": 2, "lowest": 1.5, "nothing": 0.4}
        )
        return Mask(
            kind,
            spans,
            content,
            self.one_of({"dense": 6, "expanded": 2, "sliced": 2, "transposed": 1}),
            self.one_of({4: 6, 2: 2, 3: 1}),
        )

    def results(self, route: str, dtype: str) -> Results:
        if not self.sometimes(0.3):
            wide = self.sometimes(0.1) and dtype in ("float16", "bfloat16")
            return Results(out="float32") if wide else Results()
        wider = {None: 6, "float32": 3, "float16": 0.7, "bfloat16": 0.7, "float64": 0.7}
        return Results(
            True,
            self.one_of(wider),
            self.one_of(wider),
            self.one_of(
                {"dense": 4, "strided": 2, "sliced": 3, "token major": 3, "memmap": 0.7,
                 "pinned": 1}
            ),
        )  # fmt: skip

    def gradient(self, route: str, dtype: str, results: Results) -> tuple[str, str | None]:
        kind = self.one_of(
            {"normal": 40, "uniform": 13, "of a sum": 12, "loss scaled": 9, "sparse rows": 6,
             "zeros": 3, "small": 5, "positive": 7, "wide range": 5}
        )  # fmt: skip
        wide = None
        if route == "pair" and dtype in ("float16", "bfloat16"):
            unrounded = results.grads == "float32"
            if self.sometimes(0.7 if unrounded else 0.06):
                wide = "float32"
        return kind, wide

    def wanted(self) -> tuple[bool, bool, bool]:
        if self.sometimes(0.85):
            return True, True, True
        found = tuple(self.sometimes(0.5) for _ in range(3))
        return found if any(found) else (False, True, False)

    def orders(self, shared: int, kv_heads: int, heads_and_batch: int) -> Orders:
        # Tight budgets are what a GPU's memory is short of.
        budget = 25 if self.on_cuda else 10
        how = self.one_of({"free": 24, "depth": 14, "budget": budget, "plan": 52})
        if how == "free":
            return Orders()
        if how == "depth":
            return Orders("depth", depth=self.one_of({0: 4, 1: 6, 2: 2}))
        if how == "budget":
            return Orders("budget", room=self.one_of({1.0: 3, 1.2: 2, 2.0: 2, 8.0: 1}))
        levels = self.one_of(_LEVELS)
        if math.prod(levels) * heads_and_batch > _MOST_UNITS:
            levels = self.r.choice([(1,), (3,), (7,)])
        tile = 128 if self.sometimes(0.3) else self.r.choice([1, 2, 4, 8, 16, 32, 64])
        groups = [None, None, shared, shared * max(1, kv_heads)]
        return Orders(
            "plan",
            levels=levels,
            layout="aligned" if self.sometimes(0.65) else "balanced",
            tile=tile,
            n_cap=self.r.choice([None, 1, 2, 3]),
            accumulator=self.r.choice([None, "device", "host"]),
            one_group_of=self.r.choice(groups),
            over_inputs=self.r.choice([None, None, False, False, True]),
            streams=self.r.choice([None, None, 1, 2]) if self.on_cuda else None,
            pinned=self.sometimes(0.7),
        )


def _few_strides(case: Case) -> Case:
    """Strides that are 1, and those that are multiples of 16, are compiled for: of inputs, of
    statistics and of masks."""
    if case.n_queries > 1:
        case = replace(case, n_queries=_or_odd(case.n_queries))
    if case.mask is not None:
        case = replace(case, n_queries=_or_odd(case.n_queries), n_keys=_or_odd(case.n_keys))
    if "sliced" in case.layouts:
        # All four, or none: where rows do not lie in words.
        all_or_none = ("sliced",) * 4 if case.layouts[0] == "sliced" else ("plain",) * 4
        case = replace(case, layouts=all_or_none)
    return case


def _or_odd(n: int) -> int:
    return n if n % 16 == 0 else max(3, n | 1)
