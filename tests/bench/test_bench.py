"""The benchmark itself: right figures, recorded failures, whole tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quorum_attention.bench import accuracy, boundary, census, cost, recovery, stages, wrapped
from quorum_attention.bench.exact import exact, relative
from quorum_attention.bench.itself import KERNELS, RESULTS, differences
from quorum_attention.bench.methods import METHODS
from quorum_attention.bench.report import table, write
from quorum_attention.bench.search import longest
from quorum_attention.bench.settings import Section, Settings, short
from quorum_attention.bench.spec import OUT_OF_MEMORY, Answer, Spec


def settings(**others) -> Settings:
    fields = {
        "device": "cpu", "heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32",
        "methods": ("sdpa", "quorum"), "min_tokens": 1024, "max_tokens": 16384,
        "accuracy_tokens": 300, "budget_bytes": 1 << 24, "repeats": 1, "draws": 2,
        "method_seconds": 10.0,
    }  # fmt: skip
    return Settings(**{**fields, **others})


class Pretended:
    """Answers from a rule instead of from a child process."""

    def __init__(self, rule) -> None:
        self.rule, self.records, self.asked = rule, [], []

    def measure(self, spec: Spec, experiment: str) -> Answer:
        self.asked.append(spec)
        return self.rule(spec)


def fast(seconds: float = 0.1) -> Answer:
    return Answer(forward_seconds=[seconds], backward_seconds=[seconds], peak_bytes=1 << 20)


def test_wrapped_kernels() -> None:
    """The appendix: preserved to rounding, recovered where the kernel as it is ends."""

    def rule(spec: Spec) -> Answer:
        if spec.itself:
            return Answer(differences={name: [(1e-3, 1e-5), (2e-3, 3e-5)] for name in RESULTS})
        if not spec.method.startswith("recovered") and spec.tokens > 2048:
            return Answer(status=OUT_OF_MEMORY)
        answer = fast(0.2)
        answer.report = {"forward": {"seconds": 4.0, "recovery_seconds": 1.0}, "backward": None}
        return answer

    preserved, *recovered = wrapped.run(
        settings(accuracy_tokens=100, draws=1, max_tokens=4096), Pretended(rule)
    )
    assert [row[:2] for row in preserved.rows][:2] == [["dense", "float32"], ["dense", "bfloat16"]]
    assert len(preserved.rows) == 6
    assert all(cells == ["2.0e-03, 2.0e-05"] * 4 for _, _, *cells in preserved.rows)
    for section in recovered:
        assert [row[0] for row in section.rows] == ["1K", "2K", "4K"]
        assert section.rows[0][2].startswith("0.")
        assert "(1x), adaptation 25%" in section.rows[0][2]
        assert section.rows[2][1] == "oom"
        assert "(-x), adaptation 25%" in section.rows[2][2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_a_kernel_recovered_is_itself(kernel: str, dtype: str) -> None:
    found = differences(settings().spec(kernel, 200, dtype=dtype, draws=1, itself=True))
    assert set(found) == set(RESULTS)
    for name, apart in found.items():
        assert len(apart) == 2, "one for every depth"
        for largest, average in apart:
            assert 0 <= average <= largest < (1e-5 if dtype == "float32" else 4e-2), name


@pytest.mark.parametrize("causal", [False, True])
def test_the_referee(causal: bool) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(1, 4, 70, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(2))
    found = exact(q, k, v, grad, is_causal=causal, scale=0.3)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=causal, scale=0.3, enable_gqa=True
    )
    wanted = [out, *torch.autograd.grad(out, leaves, grad)]
    for name, right in zip(("out", "grad_query", "grad_key", "grad_value"), wanted, strict=True):
        assert relative(found[name], right.detach()) < 1e-12, name


def test_a_sweep_stops_where_a_method_ends() -> None:
    def rule(spec: Spec) -> Answer:
        if spec.method == "sdpa" and spec.tokens > 4096:
            return Answer(OUT_OF_MEMORY)
        return fast()

    pretended = Pretended(rule)
    forward, both = cost.run(settings(), pretended)
    assert [row[0] for row in forward.rows] == ["1K", "2K", "4K", "8K", "16K"]
    assert [row[1].split()[0] if row[1] else "" for row in both.rows][2:] == ["0.2", "oom", ""]
    assert forward.rows[2][2].startswith("0.1 (1x")
    assert forward.rows[4][2].startswith("0.1 (-x")  # nothing to compare with any more


def test_a_sweep_stops_before_it_takes_too_long() -> None:
    pretended = Pretended(lambda spec: fast(spec.tokens / 1024))
    cost.run(settings(method_seconds=20.0), pretended)
    forward = [s.tokens for s in pretended.asked if not s.backward and s.method == "sdpa"]
    assert forward == [1024, 2048, 4096]


@pytest.mark.parametrize(("limit", "found"), [(100, 0), (5000, 4096 + 512 * 0), (7000, 6144),
                                              (7900, 7168), (1 << 20, 16384)])  # fmt: skip
def test_the_longest_call_is_searched_for(limit: int, found: int) -> None:
    pretended = Pretended(lambda s: fast() if s.tokens <= limit else Answer(OUT_OF_MEMORY))
    chosen = longest(settings(), pretended, "sdpa", backward=False, experiment="boundary")
    assert chosen == found
    assert all(spec.budget_bytes == 1 << 24 for spec in pretended.asked)


def test_the_other_experiments_make_whole_tables() -> None:
    report = {
        name: {
            "seconds": 1.0, "overlap": 0.5, "recoveries": ["once"],
            "stages": dict.fromkeys(("gather", "h2d", "compute", "merge", "d2h", "scatter"), 0.1),
        }
        for name in ("forward", "backward")
    }  # fmt: skip

    def rule(spec: Spec) -> Answer:
        if spec.method == "sdpa" and spec.tokens > 2048:
            return Answer(OUT_OF_MEMORY)
        found = fast()
        found.report = report
        found.errors = {n: [1e-4] * 2 for n in ("out", "grad_query", "grad_key", "grad_value")}
        return found

    pretended = Pretended(rule)
    for experiment in (accuracy, recovery, stages, boundary):
        for section in experiment.run(settings(), pretended):
            assert section.rows
            assert all(len(row) == len(section.columns) for row in section.rows), section.name
    (rows,) = (section.rows for section in recovery.run(settings(), pretended))
    assert [row[1] for row in rows][1:] == ["oom", "oom", "oom"]
    assert "recovered 2x" in rows[1][2]


def test_the_census_is_the_papers() -> None:
    (section,) = census.run(settings(), Pretended(lambda spec: fast()))
    assert section.rows[0] == ["64K", "1", "22.01 / 77.17 / 0.82", "22.44 / 77.56 / 0.00"]
    assert section.rows[1][2] == "38.77 / 58.93 / 2.30"


def test_a_report_has_tables_figures_and_raw_figures(tmp_path: Path) -> None:
    def draw(axes) -> None:
        axes.plot([1, 2], [3, 4])

    section = Section("x", "A title", "Words.", ["a", "b"], [["1", "2|3"]], draw)
    run = {"started": "at noon", "command": "a command", "experiments": []}
    files = write(tmp_path, [section], {"device": "d"}, [run])
    text = files[0].read_text()
    assert "| 1 | 2\\|3 |" in text
    assert "![A title](x.png)" in text
    assert "`a command` (started at noon)" in text
    assert files[1].stat().st_size > 1000
    assert table([], []) == []


def test_names_and_lengths() -> None:
    assert all(name == method.name for name, method in METHODS.items())
    assert [short(n) for n in (1000, 1024, 3 << 19, 1 << 20)] == ["1000", "1K", "1536K", "1M"]


def test_quick_is_few_measurements_of_every_experiment() -> None:
    """Counted, because what a measurement costs more than anything else is its process."""
    chosen = settings(
        quick=True, methods=("flash", "cudnn", "quorum"), dtype="float16", device="cuda",
        min_tokens=32_768, max_tokens=65_536,
    )  # fmt: skip

    def rule(spec: Spec) -> Answer:
        if spec.itself:
            return Answer(differences={name: [(1e-3, 1e-5)] for name in RESULTS})
        if spec.budget_bytes and spec.method != "quorum" and spec.tokens > 32_768:
            return Answer(OUT_OF_MEMORY)
        return fast()

    pretended = Pretended(rule)
    for experiment in (accuracy, cost, recovery, stages, census, boundary, wrapped):
        sections = experiment.run(chosen, pretended)
        assert all(section.rows for section in sections)
        assert all(len(row) == len(s.columns) for s in sections for row in s.rows)
    different = set(pretended.asked)
    assert 20 <= len(different) <= 30
    assert {spec.dtype for spec in different} == {"float16"}
