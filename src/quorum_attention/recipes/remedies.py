"""What to switch on so that a training step fits, and how long a text may be."""

from __future__ import annotations

from dataclasses import replace

from quorum_attention.arithmetic import last_fitting
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.recipes.layer_bytes import returned_bytes
from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.step_estimate import (
    StepMemory,
    step_beside_attention,
    switched_step,
    with_plain_bytes,
)
from quorum_attention.recipes.switches import ATTENTION, HOST, SWITCHES, TILES
from quorum_attention.recipes.training import Training
from quorum_attention.units import format_bytes, parse_memory

# A longest text is told to one part in this many.
_RESOLUTION = 64


def switch_until_it_fits(
    shape: ModelShape, training: Training, memory: int | str
) -> tuple[StepMemory, bool]:
    """Switch on changes, the cheapest first, until a step fits.

    Args:
        memory: of the device, bytes or "80GiB".

    Returns:
        The step with these changes, and whether it fits. If it does not, all changes
        are on.
    """
    limit = parse_memory(memory, "memory")
    on = _switches(training)
    smallest = _switch(shape, training, on, limit)
    for name in reversed(on):
        if TILES in on and name in (ATTENTION, HOST):
            continue  # layers in tiles need them
        fewer = tuple(
            switch for switch in on if switch != name or switch in training.on
        )
        enough = max(limit, smallest.peak_bytes)
        if _least_peak(shape, training, fewer) > enough:
            continue
        candidate = _switch(shape, training, fewer, limit)
        if candidate.peak_bytes <= enough:
            on = fewer
            smallest = candidate
    smallest = with_plain_bytes(shape, training, smallest)
    spare = max(0, limit - smallest.peak_bytes)
    smallest = replace(smallest, host_bytes=max(0, smallest.host_bytes - spare))
    return smallest, smallest.peak_bytes <= limit


def longest_that_fits(
    shape: ModelShape,
    training: Training,
    memory: int | str,
    host_memory: int | str | None = None,
) -> int:
    """Return the number of tokens of the longest text whose step fits, with the changes
    that it needs.

    Args:
        training: how the model is trained. Texts of up to ``training.tokens`` tokens
            are tried.
        memory: of the device, bytes or "80GiB".
        host_memory: host memory that may be page-locked; None: no limit.

    Returns:
        A multiple of a 64th of ``training.tokens``; 0 if none of these lengths fits.
    """
    limit = parse_memory(memory, "memory")
    host_limit = (
        None
        if host_memory is None
        else parse_memory(host_memory, "host_memory", or_zero=True)
    )
    grain = max(1, training.tokens // _RESOLUTION)

    def fits(n_grains: int) -> bool:
        shorter = replace(training, tokens=n_grains * grain)
        return _fits(shape, shorter, limit, host_limit)

    return last_fitting(training.tokens // grain, fits) * grain


def _switches(training: Training) -> tuple[str, ...]:
    """All switches that a device has. A CPU has no other memory to keep anything in."""
    if training.device == GPU:
        return (*SWITCHES, TILES)
    return tuple(name for name in SWITCHES if name != HOST)


def _fits(
    shape: ModelShape, training: Training, limit: int, host_limit: int | None
) -> bool:
    """Whether a step fits with whatever has to be switched on."""
    on = _switches(training)
    if _least_peak(shape, training, on) > limit:
        return False
    if _switch(shape, training, on, limit).peak_bytes > limit:
        return False
    if host_limit is None:
        return True
    step, _ = switch_until_it_fits(shape, training, limit)
    return step.host_bytes <= host_limit


def _switch(
    shape: ModelShape, training: Training, on: tuple[str, ...], limit: int
) -> StepMemory:
    """A step with these switches on; attention, where no budget is asked for, in the
    memory that a layer's other parts leave. It is off where it is not needed, or cannot
    work in its budget."""
    without = replace(training, on=_without_attention(on))
    is_needed = ATTENTION in training.on or TILES in on
    if ATTENTION not in on:
        return switched_step(shape, without)
    if not is_needed:
        step = switched_step(shape, without)
        if step.peak_bytes <= limit:
            return step
    budget = training.budget
    if budget is None:
        budget = _budget_that_is_left(shape, training, without, limit)
    if budget is not None:
        try:
            return switched_step(shape, replace(training, budget=budget, on=on))
        except BudgetError:
            pass
    return switched_step(shape, without)


def _without_attention(on: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in on if name != ATTENTION)


def _least_peak(shape: ModelShape, training: Training, on: tuple[str, ...]) -> int:
    """Bytes that a step takes at least with these switches on. Most steps that do not
    fit are seen here: to plan attention takes a second for a million tokens."""
    steps = [
        step_beside_attention(shape, replace(training, on=switches))
        for switches in (on, _without_attention(on))
    ]
    return min(step.peak_bytes for step in steps)


def _budget_that_is_left(
    shape: ModelShape, training: Training, without: Training, limit: int
) -> int | None:
    """The budget of attention in the memory that a layer's other parts leave; None:
    they leave nothing."""
    used = 0
    for part in step_beside_attention(shape, without).parts:
        if part.when in ("always", "layer", "attention") and part.switch != ATTENTION:
            used += part.bytes
    if used >= limit:
        return None
    returned = 0
    if TILES not in without.on:
        # The forward returns less than the backward, so neither takes more than is
        # left.
        returned = returned_bytes(shape, training, backward=False)
    return limit - used + returned


def advice_words(step: StepMemory) -> str:
    """Return what is switched on, in words; an empty text for nothing."""
    words = {ATTENTION: f"quorum attention (budget {format_bytes(step.budget or 0)})"}
    return ", ".join(words.get(name, name) for name in step.on)
