"""A case of a seed. Corners are drawn far more often than chance would have them.

On a GPU nearly every free case meets something that no other has: Triton compiles a
kernel for each dtype, width and option, and again for each pattern of strides and
addresses that are multiples of 16. That takes 0.3 to 3 s a call, all else some
hundredths. So on a GPU ``BLOCK`` neighbouring seeds share what is compiled for;
everything else is drawn as freely as ever.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from random_calls.case import Case, Mask, Orders, Results, Rules, Scores

BLOCK = 16
# What is drawn, with its weight. A function is asked for the value.
Weights = dict[Any, float]
_CORNERS = (
    *range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, *range(125, 131), *range(249, 260),
)  # fmt: skip
_LONGER = (*range(380, 388), *range(505, 515), 640, 767, 768, 769)
_LONG = (*range(1008, 1027), 1151, 1280)
_TOKENS: Weights = {
    lambda r: r.randint(1, 300): 40, lambda r: r.randint(1, 40): 22,
    lambda r: r.choice(_CORNERS): 28, lambda r: r.choice(_LONGER): 4,
    lambda r: r.choice(_LONG): 1.2, lambda r: r.randint(1100, 2000): 0.15,
}  # fmt: skip
_WIDTHS: Weights = {
    "any": 35, lambda r: r.choice([4, 8, 16, 32, 64]): 52, 128: 4,
    lambda r: r.choice([72, 80, 96, 192]): 4, 257: 2, 1: 3,
}  # fmt: skip
# On a GPU every one is compiled for: a few, and all kinds among them.
_CUDA_WIDTHS: Weights = {16: 3, 64: 5, 128: 1, 8: 1, 73: 1, 40: 0.5, 257: 0.2}
# Times the usual scale; or itself, where that is a function.
_SCALES: Weights = {
    None: 68, lambda r: r.uniform(0.1, 3): 12, lambda r: -r.uniform(0.1, 3): 9, 0.0: 4,
    lambda r: r.choice(["5", "-5", "30"]): 4, lambda r: r.choice(["1e-6", "-1e-6"]): 3,
}  # fmt: skip
# The more tasks, the rarer.
_LEVELS: Weights = {
    (): 4, (1,): 6, (3,): 8, (7,): 8, (13,): 3, (21,): 1.5, (31,): 1.5, (3, 3): 4, (7, 3): 1.5,
    (7, 7): 1.5, (1, 7): 1.5, (3, 1): 1.5, (1, 1): 1, (1, 3): 1.5, (3, 3, 3): 0.7, (13, 3): 0.5,
    (3, 7): 1,
}  # fmt: skip
_BATCHES: Weights = {
    (1,): 55, (): 10, (2,): 16, (3,): 5, (1, 2): 3, (2, 2): 2, (2, 1): 2, (0,): 0.7,
}  # fmt: skip
_CPU_KERNELS: Weights = {
    "auto": 60, "cpu": 10, "dense": 10, "function": 3, "function explicit": 2, "scores": 5,
    "native": 0.005, "native scores": 0.005,
}  # fmt: skip
_CUDA_KERNELS: Weights = {
    "auto": 10, "cudnn": 2, "flash": 16, "efficient": 20, "native": 16, "dense": 8,
    "function": 3, "function explicit": 1, "native scores": 3,
}  # fmt: skip
_CONTENTS: Weights = {
    "normal": 42, "sink": 14, "sinks": 4, "one hot": 12, "large scores": 7, "tiny": 4,
    "constant": 4, "extremes": 3, "offset values": 5, "spread rows": 5,
}  # fmt: skip
_GRADIENTS: Weights = {
    "normal": 40, "uniform": 13, "of a sum": 12, "loss scaled": 9, "sparse rows": 6, "zeros": 3,
    "small": 5, "positive": 7, "wide range": 5,
}  # fmt: skip
_MASKS: Weights = {
    "random": 4, "dead rows": 4, "padding": 2, "bias": 2, "lowest": 1.5, "nothing": 0.4,
    "alibi": 3, "shifted": 1.5,
}  # fmt: skip
_LAYOUTS: Weights = {
    "plain": 8, "token major": 3, "sliced": 2, "offset": 1, "expanded heads": 1,
    "expanded batch": 0.7, "expanded rows": 0.5, "every other element": 0.7, "transposed": 0.7,
    "packed": 1, "array": 0.3, "overlapping": 0.5, "permuted": 1,
}  # fmt: skip
_RESULT_DTYPES: Weights = {
    None: 6,
    "float32": 3,
    "float16": 0.7,
    "bfloat16": 0.7,
    "float64": 0.7,
}
_RESULT_LAYOUTS: Weights = {
    "dense": 4, "strided": 2, "sliced": 3, "token major": 3, "pinned": 1,
}  # fmt: skip
_CAPPED = ("auto", "dense", "native")
_PLAIN = ("auto", "cpu", "dense", "native", "fa4", "cudnn", "flash", "efficient")
# Vendors' operators, which take rectangles wherever they are: rows may pass by.
_PASSING = ("auto", "cpu", "fa4", "cudnn", "flash", "efficient")
_ROWS = (1, 7, 16, 33, 64, 100, 128, 256)
_MOST_PAIRS = 150_000
_MOST_UNITS = 64


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
    def __init__(
        self, seed: int, device: str, failing: bool, kernel: str | None
    ) -> None:
        self.seed, self.failing, self.kernel = seed, failing, kernel
        self.on_cuda = device != "cpu"
        self.r = random.Random(seed)
        # What all of some neighbouring seeds draw alike.
        self.shared = random.Random(f"kind {seed // BLOCK}") if self.on_cuda else self.r
        # Kernels are tried out for every head dimension they meet: some at a time.
        self.odd_widths = random.Random(seed // 1000).sample(range(1, 81), 5)

    def one_of(self, weights: Weights) -> Any:
        found = self.r.choices(list(weights), list(weights.values()))[0]
        return found(self.r) if callable(found) else found

    def sometimes(self, chance: float) -> bool:
        return self.r.random() < chance

    def case(self) -> Case:
        r, one_of, sometimes = self.r, self.one_of, self.sometimes
        crowded = sometimes(0.015)
        n_queries, n_keys = (
            (r.randint(1, 5), r.randint(1, 6)) if crowded else self.lengths()
        )
        long = max(n_queries, n_keys)
        if crowded:
            batch, heads, kv_heads = self.crowd()
        else:
            batch, heads, kv_heads = self.heads(n_queries, n_keys)
        self.r = self.shared
        head_dim = self.width(long)
        kernel = self.kernel or one_of(_CUDA_KERNELS if self.on_cuda else _CPU_KERNELS)
        interpreted = "native" in kernel and not self.on_cuda
        if interpreted:
            crowded = False
            n_queries, n_keys, head_dim = (
                min(n_queries, 20),
                min(n_keys, 20),
                min(head_dim, 16),
            )
            batch, heads, kv_heads = (1,), min(heads, 2), 1
        value_dim = (
            head_dim if sometimes(0.9 if self.on_cuda else 0.8) else self.width(long)
        )
        dtype = one_of({"float16": 38, "bfloat16": 20, "float32": 34, "float64": 8})
        if interpreted:
            dtype = r.choice(["float16", "float32"])
        if kernel == "fa4":
            dtype = self.r.choice(["float16", "bfloat16"])
            head_dim, value_dim = self.r.choice(
                [(64, 64), (128, 128), (96, 96), (192, 128)]
            )
        scores, plain = self.scores(kernel), kernel in _PLAIN
        masked = sometimes(0.27) and plain
        # Dtypes of masks, bits of rules and soft caps are compiled for.
        mask_kind = one_of(
            {"bool": 4, "float": 4, "float32": 4, "float64": 1, "half": 1}
        )
        ruled = plain and kernel != "fa4" and sometimes(0.2)
        softcap = (
            self.r.choice([2.0, 50.0]) if kernel in _CAPPED and sometimes(0.2) else None
        )
        self.r = r
        mask = self.mask(mask_kind) if masked and kernel != "fa4" else None
        rules = self.rules(softcap, n_queries, n_keys) if ruled else None
        route = (
            "pair"
            if self.failing
            else one_of({"autograd": 45, "pair": 45, "forward": 10})
        )
        by_pair, content, grad = route == "pair", one_of(_CONTENTS), one_of(_GRADIENTS)
        edges = ("wide range", "loss scaled")
        if (
            dtype == "float16" and not plain
        ):  # a function of the user's rounds its gradients itself
            grad = "normal" if grad in edges else grad
            content = "normal" if content == "extremes" else content
        if kernel.startswith("function") and content == "large scores":
            content = "normal"  # it keeps few digits of those by itself
        scale = self.scale(head_dim)
        if kernel.startswith("function") and scale is not None and abs(scale) >= 5:
            scale = None  # likewise
        results = self.results(dtype)
        wide = by_pair and dtype in ("float16", "bfloat16")
        wide = wide and sometimes(0.7 if results.grads == "float32" else 0.06)
        sizes = (heads // kv_heads, kv_heads, kv_heads * math.prod(batch))
        orders = self.orders(*sizes)
        again = self.orders(*sizes) if by_pair and sometimes(0.4) else None
        if crowded:
            # Cut, each entry is a unit of its own.
            orders, again = (
                r.choice([Orders(), Orders(), Orders("depth", depth=0)]),
                None,
            )
        failure = None
        if by_pair and not interpreted and (self.failing or sometimes(0.06)):
            first = r.choice([*range(1, 12), r.randint(12, 90)])
            failure = (
                r.choice(["forward", "backward"]),
                first,
                r.choice([1, 1, 1, 2, 3]),
            )
        more = plain and route != "forward"
        mask_grad = more and mask is not None and mask.kind != "bool" and sometimes(0.6)
        lse_grad = one_of({None: 80, 1.0: 14, 30.0: 3, 1e-3: 3}) if more else None
        last = again or orders
        # Neither a forward nor a plan knows of the columns that carry it.
        if (not by_pair and last.how == "budget") or (
            last.how == "plan" and not last.pinned
        ):
            lse_grad = None
        # Ten times the largest numbers of a dtype are none.
        drops = kernel in ("auto", "cpu", "dense", "native") and not (
            mask_grad or lse_grad
        )
        drops = drops and content != "extremes" and grad not in edges
        found = Case(
            self.seed, batch, heads, kv_heads, n_queries, n_keys, head_dim, value_dim, dtype,
            is_causal=sometimes(0.55), scale=scale, mask=mask, rules=rules,
            layouts=tuple("plain" if sometimes(0.35) else one_of(_LAYOUTS) for _ in range(4)),
            content=content, grad=grad, grad_dtype="float32" if wide else None,
            route=route, requires_grad=self.requires_grad(), kernel=kernel, scores=scores,
            orders=orders, backward_orders=again, results=results, failure=failure,
            residency=r.choice(["device", "host"]), reported=sometimes(0.7), mask_grad=mask_grad,
            lse_grad=lse_grad,
            dropout=r.choice([0.05, 0.3, 0.9]) if drops and sometimes(0.11) else 0.0,
            without_lse=not by_pair and lse_grad is None and sometimes(0.5),
        )  # fmt: skip
        found = self.passing(found)
        return _few_strides(found) if self.on_cuda and "native" in kernel else found

    def lengths(self) -> tuple[int, int]:
        n, kind = (
            self.one_of(_TOKENS),
            self.one_of({"equal": 62, "few": 20, "any": 16, 0: 1}),
        )
        if kind == "equal":
            return n, n
        other = {"few": self.r.randint(1, 5), "any": self.one_of(_TOKENS), 0: 0}[kind]
        return (n, other) if self.sometimes(0.6) else (other, n)

    def heads(self, n_queries: int, n_keys: int) -> tuple[tuple[int, ...], int, int]:
        """A batch's shape, query heads and key heads."""
        long, batch = max(n_queries, n_keys), self.one_of(_BATCHES)
        kv_heads = self.one_of({1: 40, 2: 40, 3: 10, 4: 5})
        shared = self.one_of({1: 66, 2: 20, 3: 6, 4: 6})
        if long > 260:
            batch = batch if math.prod(batch) <= 1 else (1,)
            kv_heads, shared = min(kv_heads, 2), min(shared, 2)
        if long > 600:
            batch, kv_heads, shared = (1,), 1, 1
        # A few milliseconds a call: fewer of them at once where sequences are longer.
        while math.prod(batch) * kv_heads * shared * n_queries * n_keys > _MOST_PAIRS:
            if kv_heads * shared == 1:
                break
            kv_heads, batch = (
                max(1, kv_heads // 2),
                (1,) if math.prod(batch) > 1 else batch,
            )
            shared = self.one_of({1: 2, 2: 1}) if kv_heads > 1 else 1
        return batch, kv_heads * shared, kv_heads

    def crowd(self) -> tuple[tuple[int, ...], int, int]:
        """Thousands of batch entries, query heads and key heads."""
        batch = self.r.choice(
            [(self.r.randint(1000, 4000),), (self.r.randint(20, 70), 50)]
        )
        kv_heads, shared = self.r.choice([(1, 1), (1, 2), (2, 1)])
        return batch, kv_heads * shared, kv_heads

    def rules(self, softcap: float | None, n_queries: int, n_keys: int) -> Rules:
        """Of a ``Mask``; those that say nothing are as good as others."""
        r, sometimes = self.r, self.sometimes
        windows = [0, 3, 20, (5, -1), (-1, 7), (40, 0), (0, 30)]
        # One tensor of ids is for as many queries as keys.
        kinds = (
            ["scattered", "scattered", "runs", "two"]
            if n_queries == n_keys
            else ["two"]
        )
        offset = (
            r.choice([r.randint(-10, 60), "lower_right"]) if sometimes(0.2) else None
        )
        return Rules(
            causal=r.choice([True, "upper_left", "lower_right", "lower_right"])
            if sometimes(0.5)
            else False,
            offset=offset,
            window=r.choice(windows) if sometimes(0.3) else None,
            chunk=r.choice([1, 7, 32, 100]) if sometimes(0.15) else None,
            documents=r.choice(kinds) if sometimes(0.5) else "",
            ids=r.choice([1, 2, 3, 10, 40]), by_entry=sometimes(0.5),
            lengths=sometimes(0.2), padding=sometimes(0.25),
            softcap=softcap,
            sinks=sometimes(0.2),
        )  # fmt: skip

    def width(self, long: int) -> int:
        found = self.one_of(_CUDA_WIDTHS if self.on_cuda else _WIDTHS)
        found = self.r.choice(self.odd_widths) if found == "any" else found
        return found if self.on_cuda or long <= 600 else min(found, 64)

    def scale(self, head_dim: int) -> float | None:
        found = self.one_of(_SCALES)
        if found is None or isinstance(found, str):
            return None if found is None else float(found)
        return found * head_dim**-0.5

    def scores(self, kernel: str) -> Scores:
        if "scores" not in kernel:
            return Scores()
        windows = [(0, 0), (5, 0), (20, 20), (40, 0), (0, 30), (3, 1)]
        found = Scores(
            window=self.r.choice(windows) if self.sometimes(0.6) else None,
            softcap=self.r.choice([2.0, 50.0]) if self.sometimes(0.4) else None,
            alibi=self.sometimes(0.4),
        )
        return found if found != Scores() else Scores(softcap=2.0)

    def mask(self, kind: str) -> Mask:
        return Mask(
            kind,
            tuple(map(self.sometimes, (0.3, 0.4, 0.75, 0.85))),
            self.one_of(_MASKS),
            self.one_of(
                {"dense": 6, "expanded": 2, "sliced": 2, "transposed": 1, "permuted": 1}
            ),
            self.one_of({4: 6, 2: 2, 3: 1}),
        )

    def results(self, dtype: str) -> Results:
        if self.sometimes(0.3):
            out, grads = self.one_of(_RESULT_DTYPES), self.one_of(_RESULT_DTYPES)
            return Results(True, out, grads, self.one_of(_RESULT_LAYOUTS))
        wide = self.sometimes(0.1) and dtype in ("float16", "bfloat16")
        return Results(out="float32") if wide else Results()

    def requires_grad(self) -> tuple[bool, ...]:
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
        levels, r = self.one_of(_LEVELS), self.r
        if math.prod(levels) * heads_and_batch > _MOST_UNITS:
            levels = r.choice([(1,), (3,), (7,)])
        return Orders(
            "plan", levels=levels, layout="aligned" if self.sometimes(0.65) else "balanced",
            tile=128 if self.sometimes(0.3) else r.choice([1, 2, 4, 8, 16, 32, 64]),
            n_cap=r.choice([None, 1, 2, 3]), accumulator=r.choice([None, "device", "host"]),
            one_group_of=r.choice([None, None, shared, shared * max(1, kv_heads)]),
            over_inputs=r.choice([None, None, False, False, True]),
            streams=r.choice([None, None, 1, 2]) if self.on_cuda else None,
            pinned=self.sometimes(0.7),
        )  # fmt: skip

    def passing(self, case: Case) -> Case:
        """The case, some of its cut passes on the route ``passing``."""
        if (
            case.kernel not in _PASSING
            or case.mask is not None
            or case.rules is not None
        ):
            return case
        # Not too many launches: a head's pairs are in some 36 rectangles at most.
        least = -(-case.n_queries // 6), -(-case.n_keys // 6)

        def changed(orders: Orders | None) -> Orders | None:
            if orders is None or not orders.levels or not self.sometimes(0.25):
                return orders
            rows = tuple(max(self.r.choice(_ROWS), fewest) for fewest in least)
            return replace(orders, passing=rows)

        by = changed(case.orders), changed(case.backward_orders)
        if by == (case.orders, case.backward_orders):
            return case
        # On a GPU it is for rows in host memory. Nothing but what is multiplied can
        # pass by.
        return replace(
            case, orders=by[0], backward_orders=by[1], dropout=0.0, lse_grad=None,
            residency="host" if self.on_cuda else case.residency,
        )  # fmt: skip


def _few_strides(case: Case) -> Case:
    """Strides that are 1, and those that are multiples of 16, are compiled for: of
    inputs, of statistics and of masks."""
    if case.n_queries > 1 or case.mask is not None:
        case = replace(case, n_queries=_or_odd(case.n_queries))
    if case.mask is not None:
        case = replace(case, n_keys=_or_odd(case.n_keys))
    odd = {"sliced", "overlapping"}  # all four, or none: where rows do not lie in words
    if odd & {*case.layouts}:
        case = replace(
            case, layouts=("sliced" if case.layouts[0] in odd else "plain",) * 4
        )
    return case


def _or_odd(n: int) -> int:
    return n if n % 16 == 0 else max(3, n | 1)
