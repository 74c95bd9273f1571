"""What an installed distribution must be able to do; run by the Python that it is
installed in, in a folder of its own. Prints "smoke: passed"; with --no-torch only what
needs none."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path


def main() -> None:
    import quorum_attention as qa

    where = Path(qa.__file__).parent
    assert "src" not in where.parts, (
        f"this is the checkout's, not the installed one: {where}"
    )
    assert importlib.metadata.version("quorum-attention") == qa.__version__
    assert importlib.resources.files("quorum_attention").joinpath("py.typed").is_file()
    assert qa.interest_set(3) == (0, 1, 3)
    said = subprocess.run(
        [sys.executable, "-m", "quorum_attention", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == qa.__version__
    if "--no-torch" not in sys.argv:
        call(qa)
    print("smoke: passed")


def call(qa) -> None:
    """Calls with their gradients against torch's: one that is cut; one of grouped heads
    under a mask whose rows do not lie together, which torch 2.7 reads wrongly on a
    CPU."""
    import torch

    q, k, v = (torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3))
    mask = torch.randn(200, 200).mT
    for named in ({"is_causal": True}, {"attn_mask": mask}):
        ours = qa.attention(q, k[:, :1], v[:, :1], **named, enable_gqa=True, depth=1)
        every = (t[:, :1].expand_as(t) for t in (k, v))
        theirs = torch.nn.functional.scaled_dot_product_attention(q, *every, **named)
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (ours, theirs)]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    main()
