"""A browser without a screen, driven over the WebDriver protocol; no package is needed
for it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A browser on a busy machine takes its time.
_SECONDS = 60.0
# It is to look up nothing that is not asked for.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
# Requests to this machine go through no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def missing() -> str:
    """What of a browser is not installed; an empty text if all is."""
    return ", ".join(
        name for name in ("chromium", "chromedriver") if shutil.which(name) is None
    )


class Browser:
    """A session of a browser.

    Args:
        driver: where chromedriver listens.
        profile: an empty folder.
    """

    def __init__(self, driver: str, profile: Path) -> None:
        self._url = f"{driver}/session"
        options = {
            "args": [*_FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")
        }  # fmt: skip
        wanted = {
            "alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}
        }
        self._url += f"/{self._ask('', {'capabilities': wanted})['sessionId']}"

    def _ask(
        self, path: str, data: dict[str, Any] | None = None, method: str = "POST"
    ) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"{self._url}{path}", body, method=method)
        with _OPENER.open(request, timeout=_SECONDS) as answer:
            return json.load(answer)["value"]

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of this size."""
        self._ask("/window/rect", {"width": width, "height": height})
        self._ask("/url", {"url": url})

    def run(self, script: str) -> Any:
        """What JavaScript returns."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def type(self, selector: str, text: str) -> None:
        """Type into an element, as a person does."""
        where = {"using": "css selector", "value": selector}
        element = self._ask("/element", where)[_ELEMENT]
        self._ask(f"/element/{element}/value", {"text": text})

    def wait_for(self, script: str) -> Any:
        """The first answer of JavaScript that is true."""
        return _until(lambda: self.run(script), script)

    def close(self) -> None:
        """End the browser."""
        self._ask("", None, "DELETE")


def _until(attempt: Callable[[], Any], what: str) -> Any:
    limit = time.monotonic() + _SECONDS
    while time.monotonic() < limit:
        if found := attempt():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not in {_SECONDS:.0f} s: {what}")


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with nothing in its profile; it has ended when the block is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Chromium makes a socket in its temporary folder, and a socket's path has at most
    # 107 characters: the folder of a test that runs beside others is too deep.
    shallow = tempfile.TemporaryDirectory(dir="/tmp")
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": shallow.name},
    )
    try:
        _until(lambda: _listens(port), "chromedriver listens")
        session = Browser(f"http://127.0.0.1:{port}", folder)
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait(timeout=_SECONDS)
        shallow.cleanup()
