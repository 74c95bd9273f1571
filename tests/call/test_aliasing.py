"""Nothing of the caller's is written but ``out`` and ``grads``, and those only where
allowed."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.attention import TOLERANCE, assert_close, exact, inputs

import quorum_attention as qa
from quorum_attention.call.overlap import (
    Mappings,
    addresses,
    may_share_memory,
    overlaps_itself,
)

pytestmark = pytest.mark.usefixtures("one_thread")
N, H, D = 40, 2, 8
SHAPE = (1, H, N, D)


def random_view(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A view of ``base`` with any strides: gaps, overlaps, interleavings."""
    while True:
        sizes = [draw.choice((1, 2, 2, 3, 3, 4, 5, 0 if draw.random() < 0.1 else 2))
                 for _ in range(draw.randint(0, 4))]  # fmt: skip
        strides = [draw.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 12, 15, 16, 24, 30, 31, 60))
                   for _ in sizes]  # fmt: skip
        start = draw.randint(0, 60)
        last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if start + last < base.numel():
            return base.as_strided(sizes, strides, start)


def elements(view: torch.Tensor) -> list[int]:
    """The places of a view's elements in its storage, one by one."""
    places = []
    for index in product(*(range(n) for n in view.shape)):
        steps = (i * s for i, s in zip(index, view.stride(), strict=True))
        places.append(view.storage_offset() + sum(steps))
    return places


def test_overlaps_of_any_strides_are_told_as_by_looking_at_every_element() -> None:
    """Also those that only arithmetic tells: views between each other's elements."""
    draw = random.Random(2026)
    base = torch.zeros(400, dtype=torch.int16)
    found = {"share": 0, "span, but do not share": 0, "overlap themselves": 0}
    for _ in range(3000):
        one, other = random_view(base, draw), random_view(base, draw)
        places, others = elements(one), elements(other)
        shared = bool(set(places) & set(others))
        seen = may_share_memory(addresses(one), addresses(other))
        assert seen == shared, (one.shape, one.stride(), other.shape, other.stride())
        twice = len(set(places)) < len(places)
        # Dimensions between each other's steps count as if they did.
        assert overlaps_itself(one) >= twice, (one.shape, one.stride())
        found["share"] += shared
        found["overlap themselves"] += twice
        if places and others and not shared:
            found["span, but do not share"] += min(places) <= max(others) and min(
                others
            ) <= max(places)
    assert min(found.values()) > 200, found


@pytest.mark.parametrize("depth", [0, 1])
def test_views_between_each_other_in_one_tensor_are_fine(depth: int) -> None:
    """Inputs, results and gradients as slices of packed tensors: spans overlap,
    elements do not."""
    plain = inputs(N, heads=H, head_dim=D)
    packed = torch.zeros(1, N, 4, H, D)
    for j, tensor in enumerate(plain.three):
        packed[:, :, j] = tensor.transpose(1, 2)
    query, key, value, out = (packed[:, :, j].transpose(1, 2) for j in range(4))
    result, lse = qa.attention_with_lse(query, key, value, out=out, depth=depth)
    assert result is out
    wanted = exact(plain, gradients=True)
    assert_close(out, wanted.out, TOLERANCE[torch.float32])
    assert torch.equal(query, plain.query)
    gradients = torch.zeros(1, H, N, 3, D)
    grads = tuple(gradients[:, :, :, j] for j in range(3))
    qa.attention_backward(
        plain.grad_out, query, key, value, out, lse, grads=grads, depth=depth
    )  # fmt: skip
    assert_close(grads, wanted.grads, TOLERANCE[torch.float32])


def call_with(**given):
    tensors = {name: torch.randn(SHAPE) for name in ("query", "key", "value")}
    return qa.attention(**{**tensors, **given})


def test_a_result_over_a_mask_or_over_itself_is_refused() -> None:
    mask = torch.zeros(1, H, N, N)
    with pytest.raises(ValueError, match="out must not share memory with attn_mask"):
        call_with(attn_mask=mask, out=mask.flatten()[: H * N * D].view(SHAPE))
    room = torch.zeros(2000)
    call_with(
        out=room.as_strided(SHAPE, (0, 320, 8, 1))
    )  # of one entry: nothing overlaps
    with pytest.raises(ValueError, match="out must not overlap itself"):
        call_with(out=room.as_strided(SHAPE, (640, 320, 4, 1)))


@pytest.mark.parametrize("read_by", ["sinks", "function"])
def test_a_result_over_what_else_a_mask_reads_is_refused(read_by: str) -> None:
    """Sinks and the tensors of a function are read again after a part is stored. Cut
    calls had wrong results, without an error."""
    room = torch.randn(SHAPE)
    mask = qa.Mask(sinks=room.flatten()[9 : 9 + H])
    if read_by == "function":
        mask = qa.Mask(keeps=lambda b, h, q, k: room[0, h, q, k % D] > 0)
    says = "must not share memory with (Mask.sinks|tensor 1 that kernel)"
    with pytest.raises(ValueError, match=f"out {says}"):
        call_with(attn_mask=mask, out=room, depth=1)
    change = {
        "attn_mask": mask,
        "grads": (room, torch.zeros(SHAPE), torch.zeros(SHAPE)),
    }
    with pytest.raises(ValueError, match=rf"grads\[0\] {says}"):
        backward_with(lambda tensors, grads: change)


def backward_with(change) -> None:
    plain = inputs(N, heads=H, head_dim=D)
    out, lse = qa.attention_with_lse(*plain.three)
    tensors = {**vars(plain), "out": out, "lse": lse}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    grads = [torch.zeros(SHAPE) for _ in range(3)]
    try:
        qa.attention_backward(**{**tensors, **change(tensors, grads)})
    finally:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), f"{name} was written to"


HALVES = torch.zeros(2 * H * N * D)
SIZE = H * N * D
Z = torch.zeros(SHAPE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, g: (g[0],) * 3, r"grads\[1\] must not share memory with grads\[0\]"),
        (lambda t, g: (HALVES[:SIZE].view(SHAPE), g[1],
                       HALVES[SIZE // 2 : SIZE // 2 + SIZE].view(SHAPE)),
         r"grads\[2\] must not share memory with grads\[0\]"),
        (lambda t, g: (t["query"], g[1], g[2]), r"grads\[0\] must not .* query"),
        (lambda t, g: (g[0], g[1], t["out"]), r"grads\[2\] must not .* with out"),
        (lambda t, g: (g[0], g[1], torch.zeros(999).as_strided(SHAPE, (9, 320, 4, 1))),
         r"grads\[2\] must not overlap itself"),
    ],
    ids=["one three times", "halves", "query", "out", "itself"],
)  # fmt: skip
def test_gradients_over_anything_are_refused_before_any_work(change, says) -> None:
    with pytest.raises(ValueError, match=says):
        backward_with(lambda tensors, grads: {"grads": change(tensors, grads)})


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"lse": Z[..., 0].long()}, TypeError, "lse must be torch.float32.*int64"),
        ({"grad_out": Z.bool()}, TypeError, "grad_out must be one of .*bool"),
        ({"lse": Z[..., 0].to("meta")}, ValueError, "lse must be in host memory"),
        ({"grad_out": Z.to_sparse()}, NotImplementedError, "grad_out must be a de"),
        ({"grads": (Z,) * 2}, TypeError, "grads must be three tensors"),
        ({"grads": (Z, Z, Z[..., 1:])}, ValueError, r"grads\[2\] must have shape"),
        (
            {"grads": (Z, Z.double(), Z)},
            TypeError,
            r"grads\[1\] must be .*32, got torch.float64",
        ),
        ({"grad_out": Z[:, :, 1:]}, ValueError, r"grad_out must have shape"),
        ({"lse": Z}, ValueError, r"lse must have shape \(1, 2, 40\)"),
        ({"lse": [1]}, TypeError, "lse must be a torch.Tensor"),
    ],
)
def test_what_a_backward_reads_has_to_be_what_a_forward_returns(
    change, kind, says
) -> None:
    with pytest.raises(kind, match=says):
        backward_with(lambda tensors, grads: change)


def read_only(kind: str, folder: Path) -> np.ndarray | torch.Tensor:
    n_bytes = 4 * H * N * D
    if kind == "flag":
        array = np.zeros(SHAPE, np.float32)
        array.flags.writeable = False
        return array
    if kind == "bytes":
        return np.frombuffer(bytes(n_bytes), np.float32).reshape(SHAPE)
    if kind == "broadcast":
        return np.broadcast_to(np.zeros((1, 1, 1, D), np.float32), SHAPE)
    path = folder / "result"
    np.zeros(SHAPE, np.float32).tofile(path)
    array = np.memmap(path, np.float32, mode="r", shape=SHAPE)
    return array if kind == "map" else torch.from_numpy(array)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "kind", ["flag", "bytes", "broadcast", "map", "tensor of a map"]
)
def test_read_only_memory_is_read_but_never_written(tmp_path: Path, kind: str) -> None:
    """Writing to a read-only map ends the process; bytes are objects that do not
    change."""
    memory = read_only(kind, tmp_path)
    before = torch.as_tensor(memory).tolist()
    with pytest.raises(ValueError, match="out must be writable"):
        call_with(out=memory)
    with pytest.raises(ValueError, match=r"grads\[1\] must be writable"):
        backward_with(lambda tensors, grads: {"grads": (grads[0], memory, grads[2])})
    assert torch.as_tensor(memory).tolist() == before
    assert torch.isfinite(call_with(key=memory)).all()


def test_two_maps_of_one_file_are_the_same_memory(tmp_path: Path) -> None:
    """At two addresses, so that no arithmetic on addresses tells."""
    if not Mappings.now().ranges:
        pytest.skip("this system does not say what is mapped where")
    path = tmp_path / "both"
    np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32).tofile(
        path
    )
    before = path.read_bytes()
    whole = np.memmap(path, np.float32, mode="r", shape=(2, *SHAPE))
    again = np.memmap(path, np.float32, mode="r+", shape=(2, *SHAPE))
    private = np.memmap(path, np.float32, mode="c", shape=(2, *SHAPE))
    with pytest.raises(ValueError, match="out must not share memory with value"):
        call_with(value=whole[0], out=again[0])
    assert path.read_bytes() == before
    call_with(value=whole[0], out=private[0])  # writes go nowhere else
    assert path.read_bytes() == before
    wanted = call_with(query=torch.ones(SHAPE), key=torch.ones(SHAPE), value=whole[0])
    found = call_with(
        query=torch.ones(SHAPE), key=torch.ones(SHAPE), value=whole[0], out=again[1]
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(
        torch.from_numpy(np.fromfile(path, np.float32)[H * N * D :]), wanted
    )


@pytest.mark.parametrize(
    ("array", "kind", "says"),
    [
        (
            np.zeros(SHAPE, np.float32)[:, :, ::-1],
            ValueError,
            "cannot be shared .* negative",
        ),
        (np.zeros(SHAPE, ">f4"), ValueError, "cannot be shared .* byte order"),
        (np.zeros(SHAPE, object), TypeError, "cannot be shared with torch"),
        (
            np.ma.masked_array(np.zeros(SHAPE, np.float32)),
            TypeError,
            "must not be a masked array",
        ),
        (np.zeros(SHAPE, np.int32), TypeError, "must be one of float16"),
    ],
)
@pytest.mark.parametrize("name", ["query", "value", "out"])
def test_arrays_that_torch_cannot_hold_are_refused_by_name(
    name, array, kind, says
) -> None:
    with pytest.raises(kind, match=f"{name} {says}"):
        call_with(**{name: array})


def test_a_lazy_sign_is_not_lost() -> None:
    """The imaginary part of a conjugate is a view with the sign still to come."""
    numbers = torch.randn(SHAPE, dtype=torch.complex64)
    negative = numbers.conj().imag
    assert negative.is_neg()
    others = {"query": torch.randn(SHAPE), "key": torch.randn(SHAPE)}
    assert torch.equal(
        call_with(**others, value=negative, depth=1),
        call_with(**others, value=-numbers.imag.clone(), depth=1),
    )
    with pytest.raises(
        ValueError, match="out must not be a view with a sign of its own"
    ):
        call_with(out=negative)
