"""What was measured is kept, whatever happens after that; and nothing is mixed with it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import quorum_attention
from quorum_attention.bench import processes as bench_processes
from quorum_attention.bench import report as bench_report
from quorum_attention.bench.itself import RESULTS
from quorum_attention.bench.results import NAME, REPORT, Results, alone_in, set_aside
from quorum_attention.bench.runner import NotKeptError, Runner
from quorum_attention.bench.settings import Settings
from quorum_attention.bench.spec import FAILED, OK, OUT_OF_MEMORY, Answer, Spec
from quorum_attention.cli import main

SETTINGS = Settings(
    "cpu", 2, 2, 16, "float32", ("sdpa", "quorum"), 64, 128, 100, 48 << 20, 1, 1, 10.0
)
ABOUT = {"device": "a machine", "quorum-attention": "1.0", "torch": "2.0", "date": "today"}
SPEC = SETTINGS.spec("sdpa", 64)
ANSWER = Answer(forward_seconds=[0.5], differences={"out": [(1.0, 0.5)]})


def opened(folder: Path, **others: str) -> Results:
    found = Results(folder, SETTINGS, {**ABOUT, **others})
    found.begin("a command", ["cost"])
    return found


def test_a_measurement_is_on_the_disk_at_once(tmp_path: Path) -> None:
    results = opened(tmp_path)
    results.add("cost", SPEC, ANSWER)
    there = json.loads((tmp_path / NAME).read_text())
    assert there["about"] == ABOUT
    assert [run["command"] for run in there["runs"]] == ["a command"]
    (record,) = there["measurements"]
    assert record["experiment"] == "cost"
    assert record["spec"]["tokens"] == 64
    assert record["answer"]["forward_seconds"] == [0.5]
    assert record["measured"].startswith("20")


def test_the_next_run_finds_it(tmp_path: Path) -> None:
    opened(tmp_path).add("cost", SPEC, ANSWER)
    again = opened(tmp_path, date="tomorrow", matplotlib="9")
    found = again.find(SPEC)
    assert found is not None
    assert found.forward_seconds == [0.5]
    assert again.find(replace(SPEC, tokens=65)) is None
    again.add("cost", replace(SPEC, tokens=65), ANSWER)
    assert [record["run"] for record in opened(tmp_path).records] == [1, 2]


def test_a_failure_is_measured_again_and_out_of_memory_is_not(tmp_path: Path) -> None:
    results = opened(tmp_path)
    results.add("cost", SPEC, Answer(FAILED, "a busy machine"))
    results.add("cost", replace(SPEC, tokens=65), Answer(OUT_OF_MEMORY))
    results = opened(tmp_path)
    assert results.find(SPEC) is None
    assert results.find(SPEC, failed=True) is not None
    assert results.find(replace(SPEC, tokens=65)) is not None
    results.add("cost", SPEC, ANSWER)
    assert [record["answer"]["status"] for record in results.records] == [OUT_OF_MEMORY, OK]


@pytest.mark.parametrize(
    ("about", "settings", "said"),
    [
        ({"torch": "2.1"}, {}, "torch 2.0, and here it is 2.1"),
        ({"quorum-attention": "1.1"}, {}, "quorum-attention 1.0, and here it is 1.1"),
        ({"device": "another"}, {}, "device a machine, and here it is another"),
        ({"triton": "3.0"}, {}, "triton nothing, and here it is 3.0"),
        ({}, {"heads": 4}, "the setting heads 2, and here it is 4"),
        ({}, {"methods": ("sdpa",)}, "methods sdpa, quorum, and here it is sdpa"),
        ({}, {"repeats": 3}, "repeats 1, and here it is 3"),
    ],
    ids=str,
)
def test_others_are_refused_by_name(
    tmp_path: Path, about: dict[str, str], settings: dict[str, object], said: str
) -> None:
    opened(tmp_path).add("cost", SPEC, ANSWER)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ValueError, match=NAME) as refused:
        Results(tmp_path, replace(SETTINGS, **settings), {**ABOUT, **about})  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert "--fresh" in str(refused.value)
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ["", "not JSON", "[]", "{}", '{"about": {}, "command": "", "measurements": []}', "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ValueError, match="cannot be added to"):
        Results(tmp_path, SETTINGS, ABOUT)
    assert (tmp_path / NAME).read_text() == text


def test_what_is_set_aside_is_whole(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None
    for number in (1, 2):
        opened(tmp_path).add("cost", SPEC, ANSWER)
        (tmp_path / REPORT).write_text("![A title](cost-both.png) [else](other.png)")
        (tmp_path / "cost-both.png").write_text("a picture")
        (tmp_path / "mine.png").write_text("not the report's")
        assert set_aside(tmp_path) == tmp_path / f"earlier-{number}"
        moved = sorted(path.name for path in (tmp_path / f"earlier-{number}").iterdir())
        assert moved == ["cost-both.png", REPORT, NAME]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "earlier-1",
        "earlier-2",
        "mine.png",
    ]


def no_room(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_takes_nothing_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = opened(tmp_path)
    results.add("cost", SPEC, ANSWER)
    before = (tmp_path / NAME).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match=rf"{NAME} cannot be written: No space left on device"):
            results.add("cost", replace(SPEC, tokens=65), ANSWER)
    assert (tmp_path / NAME).read_bytes() == before
    assert os.listdir(tmp_path) == [NAME]
    # With room again it goes on, with what it had.
    results.add("cost", replace(SPEC, tokens=66), ANSWER)
    assert [r["spec"]["tokens"] for r in opened(tmp_path).records] == [64, 66]


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(ValueError, match="another run is adding to"), alone_in(tmp_path):
            pass
        with alone_in(tmp_path / "elsewhere"):
            pass
    with alone_in(tmp_path):
        pass


def test_where_nothing_can_be_locked_nothing_is_lost(tmp_path: Path) -> None:
    """Who finds another's file in place of its own leaves it."""
    mine, others = opened(tmp_path), opened(tmp_path)
    others.add("cost", SPEC, ANSWER)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(OSError, match="is not as this run left it"):
        mine.add("cost", replace(SPEC, tokens=65), ANSWER)
    assert (tmp_path / NAME).read_bytes() == before


class Pretended:
    """Answers at once; remembers what it was asked."""

    def __init__(self, timeout: float = 0.0) -> None:
        self.asked: list[Spec] = []

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def measure(self, spec: Spec) -> Answer:
        self.asked.append(spec)
        if spec.itself:
            return Answer(differences={name: [(1e-3, 1e-5)] for name in RESULTS})
        names = ("out", "grad_query", "grad_key", "grad_value")
        return Answer(
            forward_seconds=[0.25], backward_seconds=[0.5], peak_bytes=1 << 20,
            errors={name: [1e-4] for name in names} if spec.draws else {},
        )  # fmt: skip


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        self.lines.append(text)

    def done(self, text: str) -> None:
        self.lines.append(text)


def test_what_is_kept_is_not_measured_again(tmp_path: Path) -> None:
    processes, heard = Pretended(), Heard()
    runner = Runner(opened(tmp_path), processes, heard)  # type: ignore[arg-type]
    for experiment in ("cost", "boundary"):
        assert runner.measure(SPEC, experiment).forward_seconds == [0.25]
    assert processes.asked == [SPEC]
    assert heard.lines == [
        "cost: sdpa, 64 float32, forward",
        "cost: sdpa, 64 float32, forward: 250 ms + 500 ms, peak 1.00 MiB",
    ]
    with pytest.raises(NotKeptError):
        Runner(opened(tmp_path)).measure(replace(SPEC, tokens=65), "cost")


BENCH = [
    "bench", "--device", "cpu", "--quick", "--min-tokens", "64", "--max-tokens", "128",
    "--tokens", "64",
]  # fmt: skip


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Pretended]:
    """Instead of real ones: one for every command."""
    made: list[Pretended] = []

    def make(timeout: float) -> Pretended:
        made.append(Pretended())
        return made[-1]

    monkeypatch.setattr(bench_processes, "Processes", make)
    return made


def test_the_same_command_goes_on(
    tmp_path: Path, processes: list[Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*BENCH, "--output", str(tmp_path)]
    assert main([*command, "--only", "cost"]) == 0
    first = capsys.readouterr()
    assert "Cost, forward+backward" in first.out
    assert "cost: sdpa, 64 float32, forward+backward: 250 ms + 500 ms" in first.err
    assert "\x1b" not in first.err
    assert len(processes[0].asked) == 4
    assert main([*command, "--only", "cost", "accuracy"]) == 0
    second = capsys.readouterr()
    assert len(processes[1].asked) == 2
    assert "has 4 measurements: none of them is made again" in second.err
    assert "Cost, forward+backward" in second.out
    assert "Accuracy by gradient" in second.out
    assert "stages" not in (tmp_path / REPORT).read_text()
    # What other commands measured stays in the report, in the usual order.
    assert main([*command, "--only", "census", "--json"]) == 0
    third = json.loads(capsys.readouterr().out)
    assert len(third["measurements"]) == 6
    titles = [line for line in (tmp_path / REPORT).read_text().splitlines() if line[:3] == "## "]
    assert titles == [
        "## Accuracy against float64", "## Accuracy by gradient", "## Cost, forward+backward",
        "## Tile census",
    ]  # fmt: skip
    assert {Path(name).name for name in third["files"]} >= {REPORT, NAME, "cost-both.png"}


def test_other_settings_are_refused_and_fresh_sets_aside(
    tmp_path: Path, processes: list[Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*BENCH, "--only", "accuracy", "--output", str(tmp_path)]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--heads", "4"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path / NAME} was measured with the setting heads 2" in said
    assert main([*command, "--heads", "4", "--fresh"]) == 0
    assert f"is in {tmp_path / 'earlier-1'} now" in capsys.readouterr().err
    assert {
        r["spec"]["heads"] for r in json.loads((tmp_path / NAME).read_text())["measurements"]
    } == {4}
    earlier = json.loads((tmp_path / "earlier-1" / NAME).read_text())
    assert {r["spec"]["heads"] for r in earlier["measurements"]} == {2}


def test_a_disk_that_fills_up_keeps_and_prints_what_there_was(
    tmp_path: Path,
    processes: list[Pretended],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*BENCH, "--only", "cost", "--output", str(tmp_path)]
    left, real = [5], os.fsync  # the run, two measurements with their directories, and no more

    def fills(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            no_room()
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fills)
        assert main(command) == 2
    said = capsys.readouterr().err
    assert f"{NAME} cannot be written: No space left on device" in said.splitlines()[-1]
    kept = len(json.loads((tmp_path / NAME).read_text())["measurements"])
    assert 1 <= kept < 4
    assert said.count("250 ms") == kept + 1, "what could not be written was printed"
    assert main(command) == 0
    assert len(processes[1].asked) == 4 - kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """256 KiB, for whoever may mount."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_really_full(
    small_disk: Path, processes: list[Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "sdpa,quorum,quorum-depth-1,quorum-depth-2"
    command = [*BENCH, "--only", "cost", "--methods", methods, "--output", str(small_disk)]
    (small_disk / "others").write_bytes(bytes(248 << 10))
    assert main(command) == 2
    assert f"{NAME} cannot be written: No space left on device" in capsys.readouterr().err
    kept = kept_in(small_disk)
    assert 1 <= kept < 8
    assert sorted(os.listdir(small_disk)) == ["others", NAME]
    os.unlink(small_disk / "others")
    assert main(command) == 0
    assert len(processes[1].asked) == 8 - kept
    assert kept_in(small_disk) == 8


def test_a_disk_without_room_for_a_picture_has_no_hold_on_the_tables(
    tmp_path: Path,
    processes: list[Pretended],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_report, "save", no_room)
    assert main([*BENCH, "--only", "cost", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "cost-both.png cannot be written: No space left on device" in printed.err
    assert "Cost, forward+backward" in printed.out
    assert kept_in(tmp_path) == 4


def test_the_census_needs_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--only", "census", "--device", "cpu", "--output", str(tmp_path)]
    assert main(command) == 0
    assert "22.01 / 77.17 / 0.82" in capsys.readouterr().out
    assert (tmp_path / REPORT).exists()
    assert main([*command, "--methods", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


def started(folder: Path) -> subprocess.Popen[str]:
    source = str(Path(quorum_attention.__file__).parents[1])
    command = [sys.executable, "-m", "quorum_attention", *BENCH, "--only", "accuracy", "cost"]
    return subprocess.Popen(
        [*command, "--output", str(folder)], env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Also where whoever runs the tests has it ignored (a job behind others).
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def kept_in(folder: Path) -> int:
    """The file is whole whenever it is looked at."""
    if not (folder / NAME).exists():
        return 0
    return len(json.loads((folder / NAME).read_text())["measurements"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_killed_in_the_middle_it_goes_on_where_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    """With real processes; and what is done is printed as it is, though there is no terminal."""
    first = started(tmp_path)
    until = time.monotonic() + 120
    while kept_in(tmp_path) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    another = started(tmp_path)
    said = another.communicate(timeout=120)[1]
    assert another.returncode == 2, said
    assert "another run is adding to" in said
    first.send_signal(number)
    first.send_signal(signal.SIGCONT)
    out, err = first.communicate(timeout=120)
    before = json.loads((tmp_path / NAME).read_text())["measurements"]
    assert first.returncode != 0
    assert 2 <= len(before) < 6
    assert err.count(" float32, ") >= 2 * len(before), "each was announced, and then said"
    if number == signal.SIGINT:
        assert "the same command goes on from there" in err
    again = started(tmp_path)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert f"has {len(before)} measurements" in err
    after = json.loads((tmp_path / NAME).read_text())["measurements"]
    assert after[: len(before)] == before
    assert len(after) == 6
    assert len({json.dumps(record["spec"]) for record in after}) == 6
    assert "Accuracy by gradient" in out
    assert "Cost, forward+backward" in out
    assert not list(tmp_path.glob("*.unfinished"))
