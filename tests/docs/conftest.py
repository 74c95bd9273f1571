"""The site of docs/, built once for all tests of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs import built_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))
