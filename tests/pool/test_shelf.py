"""An order on a shelf is had by one process, whoever is first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

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


def test_nobody_waits_where_a_program_says_how_long_sockets_wait() -> None:
    socket.setdefaulttimeout(5.0)
    try:
        one, begun = shelf(), time.monotonic()
    finally:
        socket.setdefaulttimeout(None)
    assert not one.take_back()
    assert taken(one.outlet) is None
    assert one.put("a")
    assert one.put("b")
    assert one.take_back()
    assert taken(one.outlet) == "b"
    assert time.monotonic() - begun < 4
    one.close()


WAITING_SOCKETS = """
import socket

socket.setdefaulttimeout(2.0)  # in the workers as well: they import this

import torch
from quorum_attention.pool import Pool

if __name__ == "__main__":
    q = torch.randn(1, 6, 900, 16)
    with Pool(["cpu", "cpu"], threads=1) as pool:
        pool.alike = lambda *asked: False
        for _ in range(3):
            pool.attention(q, q, q)
        assert len(pool.devices) == 2
"""


def test_workers_of_such_a_program_stay(tmp_path: Path) -> None:
    script = tmp_path / "waiting_sockets.py"
    script.write_text(WAITING_SOCKETS)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


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
