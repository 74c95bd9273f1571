"""The tensors of a case: contents, strides, and what may not change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

import quorum_attention as qa
from random_calls.case import Case, Mask, Rules

DTYPES = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")
}

NAMES = ("query", "key", "value")


@dataclass
class Memory:
    """Memory that a call may only read, or write as far as ``view`` reaches, and what
    was in it."""

    name: str
    base: torch.Tensor
    view: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.copy = self.base.clone()

    def changed(self) -> bool:
        """Whether anything but the view has changed; undoes the view, so asked last."""
        if (view := self.view) is not None:
            same_place = self.copy.as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
            view.detach().copy_(same_place)
        bits = (
            t.detach().reshape(-1).view(torch.uint8) for t in (self.base, self.copy)
        )
        return not torch.equal(*bits)


@dataclass
class CallInputs:
    """Everything a call is handed.

    Attributes:
        query, key, value, grad_out, mask: as handed over (strided views).
        grad_lse: the upstream gradient of the log-sum-exp, or None.
        rules: the ``Mask`` without its bias, or None.
        read_only: memory of which nothing may change.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    mask: torch.Tensor | None
    read_only: list[Memory]
    grad_lse: torch.Tensor | None = None
    rules: qa.Mask | None = None

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def attn_mask(self, bias: torch.Tensor | None) -> torch.Tensor | qa.Mask | None:
        """What a call is handed as ``attn_mask`` if ``bias`` is the tensor."""
        return bias if self.rules is None else replace(self.rules, bias=bias)

    def on(self, device: torch.device) -> CallInputs:
        """The same numbers on a device."""
        if self.query.device == device:
            return self
        tensors = {
            name: None if (tensor := getattr(self, name)) is None else tensor.to(device)
            for name in ("query", "key", "value", "grad_out", "mask", "grad_lse")
        }
        # The equations read the tensors of ``rules`` wherever they are.
        return replace(self, **tensors)


def slopes_of(heads: int) -> torch.Tensor:
    """ALiBi's, the same each time."""
    return torch.rand(heads, generator=torch.Generator().manual_seed(3)) * 0.2


def make(case: Case, device: torch.device) -> CallInputs:
    """The inputs of a case, the same each time."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    tensors = [tensor.to(dtype) for tensor in _contents(case, generator)]
    result_dtype = DTYPES[case.results.out or case.dtype]
    grad_dtype = DTYPES[case.grad_dtype] if case.grad_dtype else result_dtype
    grad_out = _gradient(case, generator, grad_dtype)
    mask = None if case.mask is None else _mask(case, case.mask, generator)
    read_only: list[Memory] = []

    shapes = {tensor.shape for tensor in tensors}
    if case.layouts[:3].count("packed") >= 2 and len(shapes) == 1:
        base, views = _packed(tensors, device)
        read_only.append(Memory("query, key and value", base))
    else:
        views = []
        for name, tensor, layout in zip(NAMES, tensors, case.layouts, strict=False):
            base, view = laid_out(tensor.to(device), layout)
            read_only.append(Memory(name, base))
            views.append(view)
    base, grad_out_view = laid_out(grad_out.to(device), case.layouts[3])
    read_only.append(Memory("grad_out", base))
    if case.grad == "of a sum":
        grad_out_view = grad_out.new_ones(()).to(device).expand(grad_out_view.shape)
    if mask is not None:
        assert case.mask is not None
        base, mask = laid_out(mask.to(device), case.mask.layout)
        read_only.append(Memory("attn_mask", base))
    grad_lse = _grad_lse(case, device)
    if grad_lse is not None:
        read_only.append(Memory("grad_lse", grad_lse))
    rules = None if case.rules is None else _rules(case, case.rules, device)
    return CallInputs(*views, grad_out_view, mask, read_only, grad_lse, rules)


def _packed(
    tensors: list[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(memory, views of query, key and value): (..., tokens, 3, heads, width), as one
    projection makes them."""
    token_major = [tensor.movedim(-3, -2) for tensor in tensors]
    base = torch.stack(token_major, dim=-3).to(device)
    return base, [base.select(-3, i).movedim(-2, -3) for i in range(3)]


def _grad_lse(case: Case, device: torch.device) -> torch.Tensor | None:
    if case.lse_grad is None:
        return None
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (*case.batch, case.heads, case.n_queries)
    return case.lse_grad * torch.randn(shape, generator=generator, dtype=dtype).to(
        device
    )


def laid_out(tensor: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, view of it that equals ``tensor``); expanded ones equal its first
    entry."""
    *lead, n, d = tensor.shape
    # Within larger rows and columns: how many, and where.
    within = {
        "sliced": (n + 5, d + 3, slice(2, n + 2), slice(1, d + 1)),
        "offset": (n + 3, d, slice(3, None), slice(None)),
        "packed": (n, 2 * d, slice(None), slice(d, None)),
        "every other element": (n, 2 * d, slice(None), slice(None, None, 2)),
        "strided": (n + 1, 2 * d, slice(1, None), slice(None, None, 2)),
    }
    if layout in within:
        rows, columns, *at = within[layout]
        base = tensor.new_full((*lead, rows, columns), 7.0)
        view = base[(..., *at)]
        view.copy_(tensor)
        return base, view
    if layout == "token major":
        base = tensor.movedim(-3, -2).contiguous()
        return base, base.movedim(-2, -3)
    if layout == "permuted":
        # Batch dimensions and heads in the opposite order.
        order = (*reversed(range(len(lead))), len(lead), len(lead) + 1)
        base = tensor.permute(order).contiguous()
        return base, base.permute(order)
    if layout == "transposed":
        base = tensor.mT.contiguous()
        return base, base.mT
    if layout == "overlapping" and tensor.numel():
        # Rows that begin within the row before, as windows over a signal do.
        step = min(3, d)
        base = tensor.flatten()[: (lead[-1] * n - 1) * step + d].clone()
        return base, base.as_strided(
            tensor.shape, (*(0 for _ in lead[1:]), n * step, step, 1)
        )
    firsts = {
        "expanded heads": (..., slice(0, 1), slice(None), slice(None)),
        "expanded rows": (..., slice(0, 1), slice(None)),
        "expanded batch": (slice(0, 1),) * len(lead[:-1]),
        "expanded": slice(0, 1),
    }
    if layout in firsts and 0 not in tensor.shape:
        base = tensor[firsts[layout]].contiguous()
        return base, base.expand(tensor.shape)
    base = tensor.contiguous().clone()
    return base, base.view(base.shape)


def _normal(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _contents(
    case: Case, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, nq, nk, d = case.batch, case.n_queries, case.n_keys, case.head_dim
    q, k = _normal(g, *b, case.heads, nq, d), _normal(g, *b, case.kv_heads, nk, d)
    v = _normal(g, *b, case.kv_heads, nk, case.value_dim)
    pick = int(torch.randint(max(1, nk), (), generator=g))
    match case.content:
        case "sink" | "sinks":
            # A direction that every query looks in, and one key, or some, that lie far
            # out in it.
            u = torch.nn.functional.normalize(_normal(g, d), dim=-1)
            q = 6 * u + 0.3 * q
            if nk:
                at = 0 if pick % 3 else pick
                where = slice(at, at + (1 if case.content == "sink" else 3))
                k[..., where, :] = 20 * u * (1 if pick % 2 else 0.3)
        case "one hot":
            sign = torch.sign(v)
            v = 9 * torch.where(sign == 0, 1.0, sign)
            if nk:
                rows = torch.randint(nk, (nq,), generator=g)
                shared = case.heads // case.kv_heads if case.kv_heads else 1
                q = k.repeat_interleave(shared, dim=-3)[..., rows, :] * (
                    1 + 3 * (pick % 3)
                )
        case "large scores":
            q = q * (600 / 3)
        case "tiny":
            q, k, v = 1e-4 * q, 1e-3 * k, 1e-4 * v
        case "constant":
            q, k, v = torch.ones_like(q), torch.ones_like(k), torch.full_like(v, 3.0)
        case "extremes":
            v = torch.sign(v) * 60_000.0
        case "offset values":
            v = 30 + 0.1 * v
        case "spread rows":
            q = q * torch.exp2(
                torch.randint(-6, 5, (*b, case.heads, nq, 1), generator=g).double()
            )
            v = v * torch.exp2(
                torch.randint(-6, 5, (*b, case.kv_heads, nk, 1), generator=g).double()
            )
    return q, k, v


def _gradient(case: Case, g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    shape = (*case.batch, case.heads, case.n_queries, case.value_dim)
    grad = _normal(g, *shape)
    n = max(1, case.n_queries)
    match case.grad:
        case "uniform":
            grad = torch.full(shape, 1 / n, dtype=torch.float64)
        case "of a sum":
            grad = torch.ones(shape, dtype=torch.float64)
        case "loss scaled":
            grad = grad * 65536 / n
        case "sparse rows":
            grad = grad * (torch.rand((*shape[:-1], 1), generator=g) < 0.1)
        case "zeros":
            grad = torch.zeros(shape, dtype=torch.float64)
        case "small":
            grad = grad * 1e-6
        case "positive":
            grad = grad.abs()
        case "wide range":
            size = torch.tensor([1e5, 1.0, 1e-9], dtype=torch.float64)
            rows = torch.randint(3, (*shape[:-1], 1), generator=g)
            # One size a call half the time, else all in one.
            grad = grad * (size[rows] if n % 2 else size[n // 2 % 3])
    most = torch.finfo(dtype).max
    return grad.clamp(-most, most).to(dtype)


def _mask(case: Case, mask: Mask, g: torch.Generator) -> torch.Tensor:
    batch, heads, rows, columns = mask.spans
    shape = [n if batch else 1 for n in case.batch]
    shape += [case.heads if heads else 1, case.n_queries if rows else 1]
    shape.append(case.n_keys if columns else 1)
    keep = torch.rand(shape, generator=g) > float(torch.rand((), generator=g))
    match mask.content:
        case "dead rows":
            keep &= torch.rand((*shape[:-1], 1), generator=g) > 0.3
        case "padding":
            stop = int(torch.randint(1, max(2, shape[-1] + 1), (), generator=g))
            keep = (torch.arange(shape[-1]) < stop).expand(shape).clone()
        case "bias":
            keep = torch.ones(shape, dtype=torch.bool)
        case "nothing":
            keep = torch.zeros(shape, dtype=torch.bool)
        case "lowest" if torch.cuda.is_available():
            # Kernels there take a row of such scores alone for one without keys
            # (docs/kernels.md).
            keep[..., :1] = True
    if mask.kind == "bool":
        made = keep
    else:
        dtype = _dtype_of(case, mask)
        # A mask is added in fp32, beside float64 in float64: lower numbers are -inf
        # there.
        added = (
            dtype
            if case.dtype == "float64" or dtype != torch.float64
            else torch.float32
        )
        off = torch.finfo(added).min if mask.content == "lowest" else -math.inf
        bias = _normal(g, *shape) * 2
        if mask.content in ("padding", "lowest"):
            bias = torch.zeros(shape, dtype=torch.float64)
        elif mask.content == "alibi":
            apart = (
                torch.arange(shape[-1]) - torch.arange(shape[-2])[:, None] * 0.3 - 3000
            )
            bias = (
                torch.rand((*shape[:-2], 1, 1), generator=g, dtype=torch.float64)
                * apart
            )
        elif mask.content == "shifted":
            bias = bias + 1e5 * (2 * torch.rand((*shape[:-1], 1), generator=g) - 1)
        most = torch.finfo(dtype).max / 4
        made = bias.clamp(-most, most).to(dtype).masked_fill(~keep, off)
    while made.dim() > max(mask.dims, 1) and made.shape[0] == 1:
        made = made[0]
    return made


def _dtype_of(case: Case, mask: Mask) -> torch.dtype:
    """Of an additive mask."""
    if mask.kind == "half":
        return torch.float16 if case.dtype == "bfloat16" else torch.bfloat16
    return DTYPES[case.dtype if mask.kind == "float" else mask.kind]


def _rules(case: Case, rules: Rules, device: torch.device) -> qa.Mask:
    """The ``Mask`` that a case describes, without its bias."""
    g = torch.Generator().manual_seed(case.seed + 2)
    batch, n, m = math.prod(case.batch), case.n_queries, case.n_keys
    rows = (batch,) if rules.by_entry else ()

    def scattered(length: int) -> torch.Tensor:
        return torch.randint(rules.ids, (*rows, length), generator=g).to(device)

    documents: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    if rules.documents == "runs":
        edges = torch.rand((*rows, n), generator=g) < rules.ids / max(1, n)
        documents = edges.cumsum(-1).to(device)
    elif rules.documents == "scattered":
        documents = scattered(n)
    elif rules.documents == "two":
        documents = scattered(n), scattered(m)
    lengths = padding = sinks = None
    if rules.lengths:
        lengths = torch.randint(m + 1, (batch,), generator=g).to(device)
    if rules.padding:
        padding = (torch.rand((*rows, m), generator=g) < 0.6).to(device)
    if rules.sinks:
        sinks = (
            (2 * torch.randn(case.heads, generator=g)).to(DTYPES[case.dtype]).to(device)
        )
    return qa.Mask(
        causal=rules.causal, offset=rules.offset, window=rules.window, chunk=rules.chunk,
        documents=documents, key_lengths=lengths, key_padding=padding, softcap=rules.softcap,
        sinks=sinks,
    )  # fmt: skip


def target(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    device: torch.device,
) -> Memory:
    """A preallocated result, full of a number that no result is."""
    pinned = layout == "pinned" and torch.cuda.is_available()
    base = torch.full(shape, -5.0, dtype=dtype, device="cpu" if pinned else device)
    base, view = laid_out(
        base.pin_memory() if pinned else base, "as it is" if pinned else layout
    )
    base.fill_(-5.0)
    return Memory(name, base, view)
