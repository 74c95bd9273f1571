from collections.abc import Iterator

import pytest
from helpers.processes import quick_workers


@pytest.fixture(autouse=True, scope="module")
def workers_start_quickly() -> Iterator[None]:
    with quick_workers():
        yield
