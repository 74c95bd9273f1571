"""Ray in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quorum_attention.ray import Farm, farm


class RayError(Exception):
    """Of tasks whose workers were lost too often."""


class RayTaskError(RayError):
    """Of tasks that raised something."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """In the place of Ray: a cluster of two CPUs, whose tasks run in this process and
    in any order when one is waited for.

    Args:
        draw: draws the order.
        dies: called before and after a task runs; if it says True, the worker dies
            then.
    """

    def __init__(
        self,
        draw: random.Random | None = None,
        dies: Callable[[Any], bool] = lambda unit: False,
    ) -> None:
        self._draw, self._dies, self.exceptions = draw or random.Random(0), dies, self
        self.asked: list[object] = []
        self.results: dict[int, Any] = {}
        self._tasks: dict[int, Any] = {}

    RayError, RayTaskError = RayError, RayTaskError

    def is_initialized(self) -> bool:
        return bool(self.asked)

    def init(self, address: object, **options: object) -> None:
        self.asked.append(address)

    def shutdown(self) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": 2.0}},
            {"Alive": False, "Resources": {}},
        ]

    def put(self, job: object) -> object:
        return job

    def remote(self, max_retries: int, **options: Any) -> Any:
        self._tries = max_retries + 1
        return lambda function: type(
            "Remote", (), {"remote": lambda *args: self._send(function, args)}
        )

    def _send(self, function: Any, args: tuple[Any, ...]) -> int:
        number = len(self._tasks) + len(self.results)
        self._tasks[number] = function, args
        return number

    def wait(
        self, refs: list[int], num_returns: int = 1, timeout: float | None = None
    ) -> Any:
        if timeout is not None:
            assert not self._tasks, "tasks run on though their call has failed"
            return refs, []
        ref = self._draw.choice(refs)
        function, args = self._tasks.pop(ref)
        self.results[ref] = RayError("its worker died")
        for _ in range(self._tries):
            if self._dies(args[1]):
                continue
            try:
                self.results[ref] = function(*args)
            except Exception as error:
                self.results[ref] = RayTaskError(error)
                break
            if not self._dies(args[1]):
                break
            self.results[ref] = RayError("its worker died")
        return [ref], []

    def get(self, ref: int) -> Any:
        found = self.results[ref]
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self, ref: int, force: bool) -> None:
        assert force
        self._tasks.pop(ref, None)


def fake_farm(ray: FakeRay | None = None, **options: Any) -> Farm:
    """A farm on a Ray in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(farm, "import_ray", lambda: ray or FakeRay())
        return Farm(**options)
