"""The two passes as data, and the slots, results and jobs that follow from them."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.call import Results
from quorum_attention.execution.case import BACKWARD, FORWARD, PassSpec, spec_of
from quorum_attention.execution.slot_rows import slot_layout
from quorum_attention.execution.workload import GroupSize, Workload

HERE = torch.device("cpu")
WORK = Workload((3,), 4, 2, 10, 7, 5, 6, torch.float16, False)
PASSES = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)


def test_there_are_two() -> None:
    assert (spec_of(False), spec_of(True)) == (FORWARD, BACKWARD)
    assert FORWARD != BACKWARD


@PASSES
def test_names_that_refer_to_others_exist(spec: PassSpec) -> None:
    names = {item.name for item in spec.inputs}
    assert [item.name for item in spec.inputs[:3]] == ["query", "key", "value"]
    assert {state.over for state in spec.states} - {None} <= names
    assert spec.divided is None or spec.divided in names
    assert sorted(sum(spec.combined, ())) == list(range(len(spec.states)))
    # States that are combined by one call have the same rows.
    for together in spec.combined:
        assert len({spec.states[index].axis for index in together}) == 1


@PASSES
def test_a_slot_holds_what_the_pass_reads_and_makes(spec: PassSpec) -> None:
    layout = slot_layout(spec, WORK, GroupSize(1, 2), (10, 7), torch.float16)
    fields = layout.fields
    for item in spec.inputs:
        assert fields[item.name].dtype == item.dtype(WORK)
        assert fields[item.name].width == item.columns(WORK)
    for state in spec.states:
        assert fields[f"state_{state.name}"].dtype == torch.float32
        assert (f"final_{state.name}" in fields) == (state.over is not None)
    assert len(fields) == len(spec.inputs) + sum(1 + (s.over is not None) for s in spec.states)


@PASSES
def test_counts_are_those_of_shapes(spec: PassSpec) -> None:
    for row in (*spec.inputs, *spec.states):
        assert row.count(WORK) == torch.Size(row.shape(WORK)).numel()
        one = row.count(WORK, GroupSize(1, 1))
        assert row.count(WORK) == one * WORK.batch * WORK.kv_heads
        assert row.count(WORK, GroupSize(1, 1), 1) * row.rows(WORK) == one


@PASSES
def test_results_are_made_where_they_are_not_there(spec: PassSpec) -> None:
    first = spec.states[0]
    given = torch.empty(first.shape(WORK), dtype=torch.bfloat16)
    results = Results(spec, WORK, torch.bfloat16, HERE, HERE, {first.name: given})
    made = results.make()
    assert made[0] is given
    for state, result in zip(spec.states, made, strict=True):
        assert result.shape == state.shape(WORK)
        assert result.dtype == (torch.float32 if state.over is None else torch.bfloat16)
    assert all(a is b for a, b in zip(results.make(), made, strict=True))


@PASSES
@pytest.mark.parametrize("batch_shape", [(), (3,), (1, 3)])
def test_a_kernels_own_results_are_taken_as_they_are(
    spec: PassSpec, batch_shape: tuple[int, ...]
) -> None:
    """They are copied only if the caller gave a result or asked for another dtype."""
    work = Workload(batch_shape, 4, 2, 10, 7, 5, 6, torch.float32, False)
    parts = [torch.randn(work.batch, *s.shape(work)[len(batch_shape) :]) for s in spec.states]
    first = spec.states[0]
    given = torch.empty(first.shape(work))
    results = Results(spec, work, torch.float32, HERE, HERE, {first.name: given})
    taken = results.take(parts)
    assert taken[0] is given
    assert torch.equal(given.flatten(), parts[0].flatten())
    for state, part, result in zip(spec.states[1:], parts[1:], taken[1:], strict=True):
        assert result.shape == state.shape(work)
        assert result.data_ptr() == part.data_ptr()
    half = Results(spec, work, torch.float16, HERE, HERE, {}).take(parts)
    wanted = [torch.float32 if s.over is None else torch.float16 for s in spec.states]
    assert [result.dtype for result in half] == wanted
