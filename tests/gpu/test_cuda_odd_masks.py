"""Masks of odd lengths, broadcast, transposed or at odd addresses: torch's vector loads of them may
end the process's CUDA context ("misaligned address"). Ours may not.

``python tests/gpu/test_cuda_odd_masks.py`` says at which of them torch's operators fail; each
operator runs in a process of its own, and in another one after each failure.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

QUERIES, KEYS = 33, 47
SHAPES = ((33, 47), (1, 47), (33, 1), (1, 1, 33, 47), (2, 1, 1, 47), (2, 4, 33, 47))
LAYOUTS = ("contiguous", "expanded", "transposed", "at an odd address")
OPERATORS = {
    "torch": None, "torch efficient": "EFFICIENT_ATTENTION", "torch cudnn": "CUDNN_ATTENTION",
    "ours": "auto", "ours efficient": "efficient", "ours cudnn": "cudnn", "ours native": "native",
}  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BROKEN = 9


class Case(NamedTuple):
    """One call: dtypes of inputs and mask, the mask's shape and layout, whether it is trained."""

    dtype: torch.dtype
    mask_dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    trained: bool


CASES = [
    Case(dtype, mask_dtype, shape, layout, trained)
    for dtype in DTYPES
    for mask_dtype in dict.fromkeys((dtype, torch.float32, torch.bool))
    for shape, layout in itertools.product(SHAPES, LAYOUTS)
    for trained in ((False, True) if mask_dtype == dtype else (False,))
]


def mask_of(case: Case) -> torch.Tensor:
    """A mask on the GPU that keeps at least the first key of every row."""
    drawn = torch.randn(case.shape, generator=torch.Generator().manual_seed(0))
    if case.mask_dtype == torch.bool:
        drawn[..., 0] = 1.0
    made = (drawn > 0 if case.mask_dtype == torch.bool else drawn.to(case.mask_dtype)).cuda()
    if case.layout == "expanded":
        return made.expand(2, 4, QUERIES, KEYS)
    if case.layout == "transposed":
        return made.mT.contiguous().mT
    if case.layout == "at an odd address":
        # Its strides are multiples of 16 elements, its address is not.
        width = -(-(made.shape[-1] + 1) // 16) * 16
        wide = torch.zeros((*made.shape[:-1], width), dtype=made.dtype, device="cuda")
        wide[..., 1 : made.shape[-1] + 1] = made
        return wide[..., 1 : made.shape[-1] + 1]
    return made


def call(operator: str, case: Case) -> float:
    """The largest error of the output and the gradients, as a share of the largest element."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, 4, n, 64, generator=generator) for n in (QUERIES, KEYS, KEYS, QUERIES)]
    *given, grad_out = (t.to("cuda", case.dtype) for t in drawn)
    mask = mask_of(case)
    exact = [t.double().cpu().requires_grad_() for t in given]
    added = mask.cpu() if mask.dtype == torch.bool else mask.double().cpu()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        wanted = sdpa(*exact, attn_mask=added)
    leaves = [t.requires_grad_() for t in given]
    mask.requires_grad_(case.trained)
    if operator.startswith("ours"):
        import quorum_attention as qa

        out = qa.attention(*leaves, mask, kernel=OPERATORS[operator])
    elif OPERATORS[operator] is None:
        out = sdpa(*leaves, attn_mask=mask)
    else:
        with sdpa_kernel(getattr(SDPBackend, str(OPERATORS[operator]))):
            out = sdpa(*leaves, attn_mask=mask)
    found = [out, *torch.autograd.grad(out, leaves, grad_out, retain_graph=case.trained)]
    if case.trained:
        torch.autograd.grad(out, mask, grad_out)
    torch.cuda.synchronize()
    right = [wanted, *torch.autograd.grad(wanted, exact, grad_out.double().cpu())]
    off = [
        ((one.double().cpu() - other).abs().max() / other.abs().max()).item()
        for one, other in zip(found, right, strict=True)
    ]
    return max(off)


def serve(operator: str, first: int) -> None:
    """Run the cases from ``first`` on: a line before and after each."""
    for number, case in enumerate(CASES[first:], first):
        print("begin", number, flush=True)
        try:
            off = call(operator, case)
        except (RuntimeError, NotImplementedError) as error:
            message = str(error).strip().splitlines()[0]
            if "CUDA error" in str(error):
                print("dies:", message, flush=True)
                sys.exit(_BROKEN)
            print("refused:", message, flush=True)
        else:
            print("right" if off < 5e-2 else f"wrong by {off:.1e}", flush=True)


def verdicts(operator: str) -> list[str]:
    """What became of every case."""
    found: list[str] = []
    while len(found) < len(CASES):
        command = [sys.executable, __file__, "--serve", operator, str(len(found))]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        before = len(found)
        found += [line for line in lines if not line.startswith("begin")]
        if lines and lines[-1].startswith("begin"):
            found.append(f"dies: exit status {done.returncode}")
        assert len(found) > before, done.stderr[-2000:]
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith("ours")])
def test_ours_takes_every_mask(operator: str) -> None:
    said = verdicts(operator)
    # cuDNN has no fp32; a kernel by name may refuse, "auto" may not.
    allowed = ("right",) if operator == "ours" else ("right", "refused")
    wrong = [(c, v) for c, v in zip(CASES, said, strict=True) if not v.startswith(allowed)]
    assert not wrong, wrong[:5]
    assert sum(v == "right" for v in said) > len(CASES) / 2


def main() -> None:
    for operator in OPERATORS:
        said = verdicts(operator)
        print(operator, dict(Counter(v.split(":")[0].split(" by")[0] for v in said)), flush=True)
        for case, verdict in zip(CASES, said, strict=True):
            if not verdict.startswith(("right", "refused")):
                names = (str(case.dtype)[6:], str(case.mask_dtype)[6:])
                print(" ", *names, case.shape, case.layout, case.trained, "|", verdict, flush=True)


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    if arguments[:1] == ["--serve"]:
        serve(arguments[1], int(arguments[2]))
    else:
        main()
