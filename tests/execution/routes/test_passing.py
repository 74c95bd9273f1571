"""The route ``passing``: its units, and overflows. (Random ones with copies as late as they may be:
execution/device/test_staging.py; recovered from: execution/test_recovery.py.)"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import exact, inputs, sink
from helpers_fake_device import FakeDevice
from helpers_passes import both_passes
from helpers_plans import passing

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}


def plan(  # type: ignore[no-untyped-def]
    n: int, queries: int, keys: int, *, backward: bool, group: int = 1, n_cap: int = 2, **more
) -> qa.Plan:  # fmt: skip
    sizes = {**SIZES, "dtype": torch.float16, "is_causal": True, **more}
    made = qa.plan(
        n, backward=backward, device="cpu", levels=(7,), layout="balanced", over_inputs=False,
        kernel="cpu", **sizes,
    )  # fmt: skip
    return passing(made, queries, keys, group=group, n_cap=n_cap)


def run(given, plans, *, is_causal=True, report=None):  # type: ignore[no-untyped-def]
    """Output and gradients, with copies as late as they may be."""
    each = tuple({"plan": plan} for plan in plans)
    with FakeDevice():
        out, _, *grads = both_passes(
            given, each, is_causal=is_causal, enable_gqa=True, devices="cpu", report=report
        )
    return out, *grads


def test_every_pair_of_chunk_and_block_is_one_unit() -> None:
    given, report = inputs(101, dtype=torch.float64, **SIZES), qa.Report()
    plans = [plan(101, 32, 20, backward=b, dtype=torch.float64) for b in (False, True)]
    run(given, plans, report=report)
    # Two head groups; 4 chunks of 32 queries against 2, 4, 5 and 6 blocks; 6 of 20 keys against 4,
    # 4, 3, 3, 2 and 1.
    assert report.forward.units == report.backward.units == 2 * 17
    assert (report.forward.accumulator, report.backward.accumulator) == ("none", "host")


@pytest.mark.parametrize("broken", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_overflow_is_scaled_down(broken, is_causal) -> None:
    """Every query attends to one key, whose dV is a sum over all of them. Beside a number that is
    not finite it takes tasks to tell which gradients that leaves."""
    n, heads = 512, 2
    given = sink(n, heads)
    wanted = exact(given, is_causal=is_causal, gradients=True)
    if broken is not None:
        given.query[0, 0, 300, 3] = broken
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": 64, "value_dim": 64}
    plans = [
        plan(n, 128, 64, backward=b, group=2, is_causal=is_causal, **sizes) for b in (False, True)
    ]
    report = qa.Report()
    found = run(given, plans, is_causal=is_causal, report=report)
    assert report.backward.repeated_units > 0
    whole = slice(0 if broken is None else 1, None)
    for mine, right in zip(found, (wanted.out, *wanted.grads), strict=True):
        torch.testing.assert_close(mine[:, whole].double(), right[:, whole], atol=2e-3, rtol=0)
