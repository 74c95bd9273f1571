"""The picture of a decomposition: which task computes which pairs, and the mask of one
task."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt
from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs, Rectangle, Task
from quorum_attention.decomposition.decomposition import Span
from quorum_attention.pictures.figures import (
    COLUMNS_OF_HALF,
    EXPLANATION_TOP,
    INK,
    LEFT_HALF,
    MASKED,
    PAPER,
    SIZE_OF_HALVES,
    SOFT,
    Colour,
    colour_at,
    fixed_style,
    new_figure,
    remove_frame,
    save,
    write_explanation,
    write_heading,
)
from quorum_attention.pictures.geometry import (
    MAX_BLOCKS,
    Point,
    blocks,
    corners,
    kept_blocks,
    with_fewer_levels,
)
from quorum_attention.units import counted

# Chunks and spans up to here have their numbers written beside them.
_NUMBERED = 20
_NUMBERS_OF_MANY = 8
# A task under a mask is drawn in cells, so many in a row.
_CELLS_OF_TASK = 256
_RIGHT_HALF = (0.555, 0.18, 0.415, 0.675)
# A square whose sides differ by more is stretched.
_LONGEST_RATIO = 3


@fixed_style()
def draw_coverage(
    decomposition: Decomposition,
    pairs: Pairs,
    path: str | PathLike[str],
    *,
    tasks: Sequence[Task] | None = None,
    mask_words: str = "",
) -> None:
    """Write a picture of ``decomposition``: every kept block by owner, and one task's
    mask.

    Args:
        decomposition: what to draw.
        pairs: which pairs the call keeps.
        path: the file; its ending is the format (.png, .svg, .pdf).
        tasks: the trimmed tasks, where tasks are trimmed under the mask.
        mask_words: ``pairs`` in words, such as "causal, window 4096".

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(*SIZE_OF_HALVES)
    n_tasks = None if tasks is None else len(tasks)
    draw_all_pairs(
        figure, decomposition, pairs, summary_of(decomposition, mask_words, n_tasks)
    )
    axes = figure.add_axes(_RIGHT_HALF)
    task = _example_task(decomposition, tasks)
    _draw_task(axes, decomposition, pairs, task)
    note = _task_note(decomposition, pairs, task)
    write_heading(axes, "One task, on its own tokens only", note)
    if decomposition.levels:
        text = _task_explanation(pairs)
        write_explanation(
            figure, _RIGHT_HALF[0], EXPLANATION_TOP, COLUMNS_OF_HALF, text
        )
    save(figure, path)


def _example_task(decomposition: Decomposition, tasks: Sequence[Task] | None) -> Task:
    """A task whose owner chunk lies between its other chunks, if there is one."""
    path = tuple(1 if n_chunks > 1 else 0 for n_chunks in decomposition.levels)
    if tasks is None:
        return decomposition.task(path)
    by_path = {task.path: task for task in tasks}
    return by_path.get(path, tasks[len(tasks) // 2])


def _task_explanation(pairs: Pairs) -> str:
    text = (
        "Coloured pairs are computed here, outlined ones are a chunk with itself. "
        "Grey pairs belong to other tasks and would be computed twice otherwise. "
    )
    if pairs.verdict is None:
        text += (
            "What is left are a few calls of an ordinary attention kernel, without a "
            "mask."
        )
    return text


def summary_of(
    decomposition: Decomposition, words: str, n_tasks: int | None = None
) -> str:
    """The title of a picture of ``decomposition``.

    Args:
        words: the kept pairs; "" for all.
        n_tasks: of the call, where it is not the decomposition's number.
    """
    parts = [counted(decomposition.n_tokens, "token")]
    if decomposition.levels:
        chunks = " x ".join(map(str, decomposition.levels))
        tasks = counted(n_tasks or decomposition.n_tasks, "independent task")
        parts += [f"{chunks} chunks", tasks]
    else:
        parts.append("one uncut task")
    if words:
        parts.append(words)
    return ", ".join(parts)


def draw_all_pairs(
    figure: Any, decomposition: Decomposition, pairs: Pairs, title: str
) -> None:
    """Draw the score square in the left half of ``figure``, in about ``MAX_BLOCKS``
    blocks."""
    x = LEFT_HALF[0]
    figure.text(
        x,
        0.952,
        title,
        color=INK,
        size=15,
        weight="bold",
    )
    axes = figure.add_axes(LEFT_HALF)
    drawn = with_fewer_levels(decomposition, pairs.is_causal)
    n_rows = max(1, min(pairs.n_queries, drawn.n_tokens))
    n_columns = max(1, min(pairs.n_keys, drawn.n_tokens))
    _add_blocks(axes, drawn, pairs)
    remove_frame(axes)
    axes.set_xlim(0, n_columns)
    axes.set_ylim(n_rows, 0)
    is_squarish = 1 / _LONGEST_RATIO <= n_rows / n_columns <= _LONGEST_RATIO
    axes.set_aspect("equal" if is_squarish else "auto", anchor="NW")
    edges = [0, *(span.stop for span in drawn.as_one_task().spans)]
    _number_chunks(axes, edges, n_rows, n_columns)
    note = _pairs_note(drawn, decomposition.depth)
    write_heading(axes, "All pairs of a query and a key", note)
    text = _pairs_explanation(drawn, pairs)
    write_explanation(figure, x, EXPLANATION_TOP, COLUMNS_OF_HALF, text)


def _add_blocks(axes: Any, decomposition: Decomposition, pairs: Pairs) -> None:
    """Add the kept blocks of all tasks in their colours."""
    from matplotlib.collections import PolyCollection

    cell = max(1, decomposition.n_tokens // (2 * isqrt(MAX_BLOCKS)))
    polygons: list[list[Point]] = []
    colours: list[Colour] = []
    for task in decomposition.tasks():
        colour = task_colour(task.path, decomposition.levels)
        task_polygons = [corners(block) for block in blocks(task, pairs, cell)]
        polygons += task_polygons
        colours += [colour] * len(task_polygons)
    collection = PolyCollection(
        polygons,
        facecolors=colours,
        edgecolors=colours,
        linewidths=0.15,
    )
    axes.add_collection(collection)


def _pairs_note(decomposition: Decomposition, depth_of_call: int) -> str:
    """A note on the drawn levels, which may be fewer than those of the call."""
    if not decomposition.levels:
        return "one call computes every pair"
    note = "each pair in exactly one task: its colour says which"
    if decomposition.depth < depth_of_call:
        note += f"; {decomposition.depth} of {depth_of_call} levels of cutting drawn"
    return note


def _pairs_explanation(decomposition: Decomposition, pairs: Pairs) -> str:
    text = "Each point is one pair: its row is the query, its column the key. "
    if pairs.verdict is not None or pairs.is_causal:
        text += "Empty: pairs that the mask leaves out. "
    if not decomposition.levels:
        return text
    second_cut = ""
    if decomposition.depth > 1:
        second_cut = f", cuts those into {decomposition.levels[1]} again,"
    return (
        f"{text}The tokens are cut into {decomposition.levels[0]} chunks; a task loads "
        f"a few of them{second_cut} and computes the pairs in its colour. All tasks "
        "together compute every pair once."
    )


def _number_chunks(axes: Any, edges: list[int], n_rows: int, n_columns: int) -> None:
    """Draw white lines along the chunks' edges, and write the chunks' numbers."""
    n_chunks = len(edges) - 1
    if n_chunks < _NUMBERED:
        inner_edges = edges[1:-1]
        axes.vlines(inner_edges, 0, n_rows, PAPER, lw=1.4)
        axes.hlines(inner_edges, 0, n_columns, PAPER, lw=1.4)
    _set_chunk_ticks(axes.xaxis, edges, n_columns)
    _set_chunk_ticks(axes.yaxis, edges, n_rows)
    unit = f"position (0 to {max(n_columns, n_rows):,})"
    if n_chunks > 1:
        longest = max(stop - start for start, stop in pairwise(edges))
        unit = f"number of their chunk (of at most {counted(longest, 'token')})"
    axes.set_xlabel(f"keys, by {unit}", color=SOFT, size=10.5)
    axes.set_ylabel("queries", color=SOFT, size=10.5)


def _set_chunk_ticks(axis: Any, edges: list[int], length: int) -> None:
    """Write the numbers of chunks at their middles. A single chunk has no number.

    Args:
        length: the tokens that are drawn. Chunks beyond them have no tick.
    """
    n_chunks = len(edges) - 1
    step = 1 if n_chunks < _NUMBERED else max(1, n_chunks // _NUMBERS_OF_MANY)
    numbered = range(0, n_chunks, step) if n_chunks > 1 else ()
    middles = []
    numbers = []
    for number in numbered:
        start = edges[number]
        visible_stop = min(edges[number + 1], length)
        if start < visible_stop:
            middles.append((start + visible_stop) / 2)
            numbers.append(str(number))
    axis.set_ticks(middles, numbers)
    axis.set_tick_params(length=0, labelsize=9.5, labelcolor=SOFT)


class _TaskCells:
    """The polygons of a task's mask, in positions among its own tokens.

    Attributes:
        computed: pairs that the task computes.
        elsewhere: pairs that other tasks compute.
        owned: chunks with themselves that the task computes.
    """

    def __init__(self, task: Task, pairs: Pairs) -> None:
        self.computed: list[list[Point]] = []
        self.elsewhere: list[list[Point]] = []
        self.owned: list[list[Point]] = []
        self._pairs = pairs
        self._cell = max(1, task.n_tokens // _CELLS_OF_TASK)
        starts = task.local_starts
        for row_number, row in enumerate(task.spans):
            n_columns = row_number + 1 if pairs.is_causal else len(task.spans)
            for column_number, column in enumerate(task.spans[:n_columns]):
                across = starts[column_number] - column.start
                down = starts[row_number] - row.start
                is_diagonal = row_number == column_number
                self._add(
                    row,
                    column,
                    (across, down),
                    is_diagonal=is_diagonal,
                )

    def _add(
        self, row: Span, column: Span, shift: tuple[int, int], *, is_diagonal: bool
    ) -> None:
        """Add the pairs of two spans, moved by ``shift``."""
        is_causal = self._pairs.is_causal and is_diagonal
        block = Rectangle(
            row.start,
            row.stop,
            column.start,
            column.stop,
            is_causal,
        )
        cells = self.computed
        if row.bits & column.bits:
            cells = self.elsewhere
        parts = kept_blocks(block, self._pairs, self._cell)
        cells.extend(_moved_corners(part, shift) for part in parts)
        if is_diagonal and row.bits == 0:
            self.owned.append(_moved_corners(block, shift))


def _moved_corners(block: Rectangle, shift: tuple[int, int]) -> list[Point]:
    across, down = shift
    return [(x + across, y + down) for x, y in corners(block)]


def _draw_task(
    axes: Any, decomposition: Decomposition, pairs: Pairs, task: Task
) -> None:
    """Draw the mask of one task."""
    axes.set_xlim(0, max(1, task.n_tokens))
    axes.set_ylim(max(1, task.n_tokens), 0)
    axes.set_aspect("equal", anchor="NW")
    remove_frame(axes)
    cells = _TaskCells(task, pairs)
    width = _line_width(task, pairs)
    colour = task_colour(task.path, decomposition.levels)
    _add_polygons(axes, cells.elsewhere, MASKED, PAPER, width)
    _add_polygons(axes, cells.computed, colour, PAPER, width)
    _add_polygons(axes, cells.owned, "none", INK, 1.6)
    axes.set_xlabel("the task's keys", color=SOFT, size=10.5)
    axes.set_ylabel("the task's queries", color=SOFT, size=10.5)


def _line_width(task: Task, pairs: Pairs) -> float:
    """The width of the lines between blocks."""
    if pairs.verdict:
        return 0.0
    return 1.2 if len(task.spans) <= _NUMBERED else 0.3


def _add_polygons(
    axes: Any, polygons: list[list[Point]], face: Colour | str, edge: str, width: float
) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(
        PolyCollection(
            polygons,
            facecolors=[face],
            edgecolors=edge,
            linewidths=width,
        )
    )


def _task_note(decomposition: Decomposition, pairs: Pairs, task: Task) -> str:
    """A line of text above the mask of a task."""
    name = "the whole call"
    if task.path:
        name = f"task {', '.join(map(str, task.path))}"
    share = task.n_tokens / decomposition.n_tokens if decomposition.n_tokens else 0.0
    note = f"{name}: {share:.1%} of the tokens"
    if pairs.verdict is not None:  # under a mask kernels cut their calls themselves
        return note
    n_calls = len(task.rectangles(pairs.is_causal))
    return f"{note}, {counted(n_calls, 'call')} of the attention kernel"


def task_colour(path: tuple[int, ...], levels: tuple[int, ...]) -> Colour:
    """A task's colour: the hue is its first owner chunk, the lightness its second."""
    turn = path[0] / levels[0] if path else 0.6
    if len(path) < 2:
        return colour_at(turn)
    middle_of_chunk = (path[1] + 0.5) / levels[1]
    return colour_at(turn, 0.67 + 0.24 * (middle_of_chunk - 0.5))
