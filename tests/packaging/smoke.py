"""What an installed distribution must be able to do; run by the Python that it is installed in, in
a folder of its own. Prints "smoke: passed"; with --no-torch only what needs none."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path


def main() -> None:
    import quorum_attention as qa

    where = Path(qa.__file__).parent
    assert "src" not in where.parts, f"this is the checkout's, not the installed one: {where}"
    assert importlib.metadata.version("quorum-attention") == qa.__version__
    assert importlib.resources.files("quorum_attention").joinpath("py.typed").is_file()
    assert qa.interest_set(3) == (0, 1, 3)
    said = subprocess.run(
        [sys.executable, "-m", "quorum_attention.cli", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == qa.__version__
    if "--no-torch" not in sys.argv:
        call(qa)
    print("smoke: passed")


def call(qa) -> None:  # type: ignore[no-untyped-def]
    """A call that is cut, with its gradients, against torch's."""
    import torch

    q, k, v = (torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3))
    qa.attention(q, k, v, is_causal=True, depth=1).sum().backward()
    grads = [t.grad.clone() for t in (q, k, v)]
    for t in (q, k, v):
        t.grad = None
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    for ours, t in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(ours, t.grad, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    main()
