"""A soak: random calls of all kinds, each checked; what the process holds, every minute.

Exit status 0: none wrong, nothing grew, nothing was left.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_SOURCE = _TESTS.parent / "src"
_M_ARENA_MAX = -8  # malloc.h


def main() -> int:
    """0 where nothing was wrong, nothing grew and nothing was left."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        _prepare(given.device, folder)
        return _soak(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="which calls (default 0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="file for the report; Markdown beside it")
    parser.add_argument(
        "--every", type=float, help="seconds between rows (default 60; a twelfth of short soaks)"
    )
    parser.add_argument("--only", action="append", help="this kind of calls; may be repeated")
    parser.add_argument("--step", type=int, help="with one --only: this step of it alone")
    return parser.parse_args()


def _prepare(device: str, folder: Path) -> None:
    """The environment of this process and its children, before torch is imported."""
    sys.path[:0] = [str(_TESTS), str(_SOURCE)]
    paths = [str(_TESTS), str(_SOURCE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What cuBLAS sets up once for every thread would be taken for a call's.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
    # oneDNN keeps compiled code for 1,024 shapes of products in bf16, 0.6 MB each: 600 MiB that
    # grow for hours of random shapes. That is torch's own; with few of them a leak can be seen.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
    # glibc gives each of the threads that come and go an arena, and what they free stays in it in
    # pieces: 150 MiB after 1,600 calls. With one arena, none.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    os.environ["QUORUM_ATTENTION_CACHE"] = str(cache)
    inner = folder / "temporary"
    inner.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(inner)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _soak(given: argparse.Namespace, folder: Path) -> int:
    from soak.outcome import Where
    from soak.report import markdown
    from soak.run import KINDS, Soak

    where = Where(given.device, folder / "temporary", _SOURCE, _TESTS)
    soak = Soak(where, given.seed, lambda line: print(line, flush=True))
    only = set(given.only or ()) or None
    unknown = (only or set()) - {kind.name for kind in KINDS}
    if unknown:
        raise SystemExit(f"--only {unknown}: kinds are {[kind.name for kind in KINDS]}")
    if given.step is not None:
        (kind,) = (kind for kind in KINDS if kind.name in (only or ()))
        soak.steps[kind.name] = given.step
        soak.step(kind)
        print(f"{soak.calls.total()} calls, {len(soak.wrong)} wrong")
        return 1 if soak.wrong else 0
    seconds = 60 * given.minutes
    passed = soak.run(seconds, given.every or min(60.0, seconds / 12), only)
    data = {"passed": passed, "minutes": given.minutes, **soak.data()}
    text = markdown(data)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        given.json.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
