"""The test of a file is found by its name: src/.../x.py has tests/.../test_x.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import quorum_attention

SRC = Path(quorum_attention.__file__).parent
TESTS = Path(__file__).parent
ROOMS = ("planner", "execution", "call", "decomposition", "quorums", "kernels")
# Folders of tests beside those of their room: they take long, or a process set up for them.
FOLDERS = {Path("kernels/kit"): Path("kit"), Path("kernels/native"): Path("native")}
# Files whose tests are those of another: what they do is seen there, and not by themselves.
ELSEWHERE = {
    # Every kernel is held against float64 in every way that it is called.
    "kernels/test_exactness.py": (
        "kernels/cpu.py", "kernels/cudnn.py", "kernels/delta.py", "kernels/dense.py",
        "kernels/efficient.py", "kernels/flash.py", "kernels/grouped.py", "kernels/rectangles.py",
    ),
    "kernels/test_registry.py": ("kernels/probe.py",),
    "kernels/test_traits.py": ("kernels/protocol.py",),
    "kernels/test_merge_triton.py": ("kernels/scaling_triton.py",),
    "kernels/test_compiling.py": ("kernels/launches.py",),
    "execution/test_scaling.py": ("kernels/scaling.py",),
    # Parts of one kernel: FlexAttention, and users' functions of scores.
    "kit/test_flex.py": (
        "kernels/kit/flex_compiled.py", "kernels/kit/flex_launch.py",
        "kernels/kit/block_masks.py", "kernels/kit/block_table.py",
    ),
    "kit/test_score_mod.py": (
        "kernels/kit/masks.py", "kernels/kit/materialised.py", "kernels/kit/over_pairs.py",
    ),
    # Parts of one kernel, in Triton.
    "native/test_kernel.py": (
        "kernels/native/forward_triton.py", "kernels/native/backward_triton.py",
        "kernels/native/loads_triton.py", "kernels/native/scores_triton.py",
        "kernels/native/walk_triton.py", "kernels/native/launch.py", "kernels/native/config.py",
    ),
    "native/test_dropout.py": ("kernels/native/dropout_triton.py",),
    "native/test_function.py": ("kernels/native/options.py",),
    "native/test_runs.py": ("kernels/native/bits.py",),
    # It takes two devices.
    "gpu/test_cuda_pool.py": ("execution/device/handed.py",),
    "gpu/test_cuda_distributed.py": ("execution/device/two_streams.py",),
    # Random masks in every route, against float64.
    "test_mask.py": (
        "call/masks.py", "kernels/masked/calls.py", "kernels/masked/choice.py",
        "kernels/masked/geometry.py", "kernels/masked/kernel.py", "kernels/masked/parts.py",
        "kernels/masked/reading.py", "kernels/masked/seen.py", "kernels/masked/tiles.py",
    ),
    "native/test_masked.py": ("kernels/masked/native.py",),
    "native/test_tried.py": (
        "kernels/masked/native_tried.py", "kernels/masked/launches.py",
    ),
    # The machine with its events, its instructions, its queue, and what it checks.
    "execution/control/test_machine.py": (
        "execution/control/events.py", "execution/control/instructions.py",
        "execution/control/queue.py", "execution/control/checks.py",
    ),
    "execution/device/test_backend.py": ("execution/device/lookup.py",),
    "execution/device/test_movers.py": (
        "execution/device/mover.py", "execution/device/stream_mover.py",
        "execution/device/cuda_mover.py",
    ),
    # What a pass is made of, and its recovery: seen in what is computed.
    "execution/test_engine.py": (
        "execution/job.py", "execution/run_pass.py", "execution/tools.py", "execution/call.py",
        "execution/routes/slots.py",
    ),
    "execution/test_recovery.py": ("execution/runner.py",),
    "execution/test_small_calls.py": ("execution/routes/whole.py",),
    "execution/routes/test_passing.py": ("execution/routes/passing_groups.py",),
    "execution/routes/test_together.py": ("execution/routes/over_inputs.py",),
    # Fields that are summed up, or chosen from, there.
    "planner/test_footprint.py": ("execution/takes.py", "execution/placement.py",
        "execution/case.py"),
    "planner/test_search.py": ("execution/routes/choice.py", "planner/policy.py"),
    "planner/test_plan.py": ("planner/make.py", "planner/options.py"),
    # Calls, as users make them.
    "call/test_aliasing.py": ("call/overlap.py", "call/mapped.py"),
    "call/test_request.py": ("call/places.py", "call/gradients.py"),
    "test_nonsense.py": ("call/validation.py", "call/options.py"),
    "test_like_torch.py": ("call/arranged.py",),
    "test_transforms.py": ("call/transforms.py",),
    # The construction is inside the sets that it makes.
    "quorums/test_interest.py": ("quorums/singer.py",),
}  # fmt: skip
PLACE = {file: test for test, files in ELSEWHERE.items() for file in files}
FILES = sorted(
    path.relative_to(SRC)
    for room in ROOMS
    for path in (SRC / room).rglob("*.py")
    if path.name != "__init__.py"
)


def by_name(file: Path) -> Path:
    """Where a newcomer looks for the test of ``file``."""
    return FOLDERS.get(file.parent, file.parent) / f"test_{file.name}"


@pytest.mark.parametrize("file", FILES, ids=map(str, FILES))
def test_every_file_has_its_test(file: Path) -> None:
    if not (TESTS / by_name(file)).exists():
        assert str(file) in PLACE, f"write tests/{by_name(file)}"
        assert (TESTS / PLACE[str(file)]).exists()


def test_the_list_names_files_that_there_are() -> None:
    assert set(PLACE) <= {str(file) for file in FILES}
