"""What a long prompt takes is said before it runs, and a plan of its layers stays in
its memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.prompt_estimate import (
    PromptRequest,
    estimate_prompt,
    longest_prompt,
)
from quorum_attention.recipes.prompt_memory import MIN_TILE, TokenBytes, plan_prompt

GIB = 1 << 30
# Qwen3-4B's.
SHAPE = ModelShape(
    kind="qwen3",
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    intermediate=9728,
    experts=0,
    experts_per_token=1,
    parameters=4_022_000_000,
    mlp_width=9728,
)


def request(**changes: Any) -> PromptRequest:
    usual = PromptRequest(262_144, 500, 24 * GIB, 128 * GIB, device="cuda")
    return dataclasses.replace(usual, **changes)


def test_bytes_of_all_places_are_those_of_weights_and_cache() -> None:
    estimate = estimate_prompt(SHAPE, request())
    weights, cache, working = estimate.parts
    assert weights.device == 2 * SHAPE.parameters
    token_bytes = 2 * 36 * 8 * 128 * 2
    assert cache.device + cache.host == (262_144 + 500) * token_bytes
    assert estimate.total("device") <= 24 * GIB
    # Hidden states take 1.25 GiB, and torch's allocator the next power of two. Queries
    # and outputs, keys and values, positions are powers of two.
    rows_bytes = (2 + 2 * 2 + 2 // 2) * GIB + 262_144 * 520
    assert working.host == rows_bytes
    assert estimate.plan.host_bytes == rows_bytes - 3 * GIB // 4
    assert estimate.fits
    assert estimate.total("file") == 0


def test_weights_in_host_memory_leave_the_device_to_the_cache() -> None:
    on_device = estimate_prompt(SHAPE, request())
    on_host = estimate_prompt(SHAPE, request(weights="host"))
    assert on_host.parts[0].device < on_device.parts[0].device / 4
    assert on_host.parts[1].device > on_device.parts[1].device
    with pytest.raises(ValueError, match='try weights="host"'):
        estimate_prompt(SHAPE, request(device_memory=4 * GIB))
    small = estimate_prompt(SHAPE, request(device_memory=4 * GIB, weights="host"))
    assert small.total("device") <= 4 * GIB


def test_what_no_place_has_room_for_is_said_and_goes_into_files() -> None:
    million = request(tokens=1 << 20, host_memory=64 * GIB)
    estimate = estimate_prompt(SHAPE, million)
    assert not estimate.fits
    assert "folder=" in estimate.advice
    in_files = estimate_prompt(SHAPE, dataclasses.replace(million, has_folder=True))
    assert in_files.fits
    assert in_files.total("file") == estimate.missing_bytes
    assert in_files.token_seconds > estimate_prompt(SHAPE, request()).token_seconds


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_rows_of_all_tokens_need_memory_that_files_do_not_replace(device: str) -> None:
    """They were left out: a prompt of a million tokens fitted into 16 GiB of memory."""
    small = request(
        tokens=1 << 20, host_memory=16 * GIB, has_folder=True, device=device
    )
    estimate = estimate_prompt(SHAPE, small)
    assert not estimate.fits
    assert "folder" not in estimate.advice
    memory = {"host_memory": 16 * GIB + estimate.missing_bytes}
    if device == "cpu":
        memory = {"device_memory": small.device_memory + 2 * estimate.missing_bytes}
    assert estimate_prompt(SHAPE, dataclasses.replace(small, **memory)).fits


@pytest.mark.parametrize("weights", ["device", "host"])
def test_the_longest_prompt_fits_and_a_longer_one_does_not(weights: str) -> None:
    asked = request(host_memory=32 * GIB, weights=weights)
    longest = longest_prompt(SHAPE, asked)
    assert longest > 0
    assert estimate_prompt(SHAPE, dataclasses.replace(asked, tokens=longest)).fits
    longer = dataclasses.replace(asked, tokens=longest + 1024)
    assert not estimate_prompt(SHAPE, longer).fits
    assert longest_prompt(SHAPE, request(device_memory=4 * GIB)) == 0


@pytest.mark.parametrize("n_tokens", [10_000, 131_072, 1 << 20])
@pytest.mark.parametrize("working", [1, 300 << 20, GIB, 5 * GIB, 80 * GIB])
def test_layers_are_planned_within_their_memory(n_tokens: int, working: int) -> None:
    token = TokenBytes.from_shape(SHAPE, 2)
    plan = plan_prompt(token, n_tokens, working)
    assert plan.tile >= MIN_TILE
    assert plan.budget >= 1
    assert plan.is_on_device == (plan.host_bytes == 0)
    if plan.tile > MIN_TILE:
        assert plan.device_bytes <= working
    if working == 80 * GIB and n_tokens < 1 << 20:
        assert plan.is_on_device


def test_what_layers_can_compute_at_once_is_not_cut() -> None:
    """A short prompt takes as long as without a cache in segments."""
    token = TokenBytes.from_shape(SHAPE, 2)
    short = plan_prompt(token, 8192, 5 * GIB)
    assert short.fits_at_once
    assert short.device_bytes <= 5 * GIB
    assert not short.with_tile(1024).fits_at_once
    assert not plan_prompt(token, 131_072, 5 * GIB).fits_at_once


@pytest.mark.parametrize("tokens", [131_072, 262_144, 524_288])
def test_a_token_takes_no_longer_with_more_memory(tokens: int) -> None:
    """Nor less than the bus and the cores need for what lies in host memory."""
    seconds = []
    for gib in (12, 16, 20, 24, 40, 80, 160):
        estimate = estimate_prompt(
            SHAPE, request(tokens=tokens, device_memory=gib * GIB, host_memory=None)
        )
        seconds.append(estimate.token_seconds)
        in_host_memory = estimate.parts[1].host - 5 * GIB  # what moves to the device
        assert estimate.token_seconds > in_host_memory / 120e9
    assert seconds == sorted(seconds, reverse=True)
