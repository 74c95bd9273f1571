"""Plain calls under ever smaller budgets, against the same call within the first of them.

    python benchmarks/tight.py [--tokens 1048576] [--heads 2] [--kv-heads 2] [--head-dim 64]
        [--budgets 1GiB,128MiB,64MiB] [--rounds 2] [--before ../before/src] [--json FILE]

Causal, fp16 (bf16 with --bfloat16), batch 1, inputs in page-locked host memory, results made by the
call, gradients by autograd. Seconds are medians after a first call, ratios are to the first budget
of the same version. Of every call the peak of device memory is held against the budget, and rows
from both ends of every result against those within the first budget. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from plain import both
from versions import Version

# Two plans round differently.
_ACCEPTED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_ROWS = 4096


class Calls:
    """The call, its tensors, and the results that others are held against."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.given = given
        self.dtype = torch.bfloat16 if given.bfloat16 else torch.float16
        kv_heads = given.kv_heads or given.heads
        self.heads = (given.heads, kv_heads, kv_heads, given.heads)
        self.tensors = [
            torch.randn(1, h, given.tokens, given.head_dim, device="cuda", dtype=self.dtype)
            .cpu()
            .pin_memory()
            for h in self.heads
        ]
        torch.cuda.empty_cache()
        self.usual: list[torch.Tensor] | None = None

    def measure(self, qa: Any, budget: str) -> dict[str, Any]:
        """First and later seconds, peak and plans of the call within ``budget``."""
        kept: list[torch.Tensor] = []

        def forward(*three: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = qa.attention(
                *three, is_causal=True, enable_gqa=True, budget=budget
            )
            kept[:] = [found, *three]
            return found

        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = [
            both(forward, self.tensors[:3], self.tensors[3]) for _ in range(1 + self.given.rounds)
        ]
        peak = torch.cuda.max_memory_allocated() - before
        ends = [_ends(kept[0].detach()), *(_ends(t.grad) for t in kept[1:] if t.grad is not None)]
        if self.usual is None:
            self.usual = ends
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(ends, self.usual, strict=True)]
        assert max(errors) < _ACCEPTED[self.dtype], f"{budget}: {errors}"
        plans = [
            qa.plan(
                self.given.tokens, heads=self.heads[0], kv_heads=self.heads[1],
                head_dim=self.given.head_dim, dtype=self.dtype, is_causal=True, budget=budget,
                backward=backward,
            )
            for backward in (False, True)
        ]  # fmt: skip
        kept.clear()
        gc.collect()
        return {
            "seconds": seconds, "peak_bytes": peak, "errors": errors,
            "predicted": [plan.predicted_seconds for plan in plans],
            "budget_bytes": plans[0].budget_bytes,
            "plans": [str(plan).splitlines()[1:4] for plan in plans],
        }  # fmt: skip


def _ends(tensor: torch.Tensor) -> torch.Tensor:
    """Rows from both ends, in fp32."""
    return torch.cat((tensor[:, :, :_ROWS], tensor[:, :, -_ROWS:]), dim=2).float()


def main() -> None:
    """Measure, print a line for each budget, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--budgets", default="1GiB,512MiB,256MiB,128MiB,64MiB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--before", type=Path, help="src of an older version")
    parser.add_argument("--only-now", default="", help="budgets that the older version is spared")
    parser.add_argument("--json")
    given = parser.parse_args()
    versions = {} if given.before is None else {"before": Version(given.before)}
    versions["now"] = Version(Path(__file__).resolve().parents[1] / "src")
    document: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
        "call": {k: v for k, v in vars(given).items() if isinstance(v, (int, str))}, "runs": [],
    }  # fmt: skip
    calls, base = Calls(given), {}
    for budget in given.budgets.split(","):
        for name, version in versions.items():
            if name == "before" and budget in given.only_now.split(","):
                continue
            with version.active() as qa:
                found = calls.measure(qa, budget)
            medians = [statistics.median(part) for part in zip(*found["seconds"][1:], strict=True)]
            first = base.setdefault(name, medians)
            ratio = medians[0] / first[0], sum(medians) / sum(first)
            fits = "" if found["peak_bytes"] <= found["budget_bytes"] else " TOO MUCH MEMORY"
            print(
                f"{budget:>7} {name:6} {medians[0]:.3f}, {medians[1]:.3f} s "
                f"({ratio[0]:.2f}; {ratio[1]:.2f}; first {sum(found['seconds'][0]):.1f} s); "
                f"predicted {found['predicted'][0]:.3f}, {found['predicted'][1]:.3f}; peak "
                f"{found['peak_bytes'] / 2**20:.1f} MiB{fits}; off {max(found['errors']):.1e}",
                flush=True,
            )
            document["runs"].append({"budget": budget, "version": name, **found})
            if given.json:
                Path(given.json).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
