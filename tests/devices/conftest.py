from collections.abc import Iterator

import pytest
from helpers_workers import quick_workers

# What these test is how workers start, or what they take over from the process that starts them.
_STARTED = ("test_forked", "test_processes")


@pytest.fixture(autouse=True, scope="module")
def workers_start_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__.rpartition(".")[2] in _STARTED:
        yield
    else:
        with quick_workers():
            yield
