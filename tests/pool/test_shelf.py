"""An order on a shelf is had by one process, whoever is first."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from quorum_attention.pool import Pool, PoolReport
from quorum_attention.pool.shelf import Shelf, taken

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")


def shelf() -> Shelf:
    made = Shelf.made()
    assert made is not None
    return made


def test_taken_or_taken_back() -> None:
    one = shelf()
    assert taken(one.outlet) is None
    assert not one.take_back()
    assert one.put({"a": 1})
    assert taken(one.outlet) == {"a": 1}
    assert not one.take_back()
    assert one.put("b")
    assert one.take_back()
    assert taken(one.outlet) is None
    assert not one.put("x" * (1 << 18))  # more than a message may be
    one.close()
    assert not one.put("c")


def test_one_of_two_has_it() -> None:
    """A worker and a pool that reach for the same orders at once."""
    one, count = shelf(), 3000
    had: list[int] = []
    over = threading.Event()

    def work() -> None:
        while True:
            ended = over.is_set()
            found = taken(one.outlet)
            if found is not None:
                had.append(found)
            elif ended:
                return

    thread = threading.Thread(target=work)
    thread.start()
    back = []
    for number in range(count):
        assert one.put(number)
        if number % 3:
            time.sleep(0)
        if one.take_back():
            back.append(number)
    over.set()
    thread.join()
    assert sorted(had + back) == list(range(count))
    one.close()


def test_workers_do_not_wait_between_orders() -> None:
    """Of a call in many parts, whose second orders are at their workers before the first end."""
    q = torch.randn(1, 6, 900, 16).share_memory_()
    waited = 0
    with Pool(["cpu", "cpu"], threads=1) as pool:
        pool.alike = lambda *asked: False  # type: ignore[method-assign]
        for worker in pool.workers:
            assert worker.shelf is not None
            put = worker.shelf.put

            def counted(message: object, put: object = put) -> bool:
                nonlocal waited
                waited += 1
                return put(message)  # type: ignore[operator]

            worker.shelf.put = counted  # type: ignore[method-assign]
        for _ in range(4):
            report = PoolReport()
            out = pool.attention(q, q, q, is_causal=True, report=report)
            ran = report.forward
            assert ran is not None
            assert sorted(one.index for one in ran.ran) == list(range(ran.parts))
            for device in range(2):
                assert ran.worked(device) <= ran.busy(device) <= ran.seconds
        assert not any(worker.withdraw() for worker in pool.workers)  # nothing stays there
    assert waited
    torch.testing.assert_close(
        out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
