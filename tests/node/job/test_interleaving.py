"""A start and a stop in every order of their steps: what `stop` says is true, then and for ever."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.job.interleaving import Actor, World, is_over

pytestmark = pytest.mark.slow

HOW = ["stop", "stop_all", "end"]


def play(home: Path, how: Sequence[str], choose: Callable[[int, list[Actor]], Actor]) -> int:
    """Start a job while others end it; return how many steps that took."""
    kept = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHESTRATOR_HOME", str(home))
        world = World(home, patch)
        try:
            start = world.add("start", world.start)
            others = [world.add(name, getattr(world, name)) for name in how]
            world.go(choose)
            for actor in world.actors:
                if isinstance(actor.result, BaseException):
                    raise actor.result
            stops = [actor for actor in others if actor.name != "kill_supervisor"]
            assert is_over(world) or (start.result and not stops)
            # No torchrun was started after a receipt.
            assert all(before == len(world.agents) for before in world.stopped_at)
        finally:
            os.chdir(kept)
            world.clear()
        return world.steps


def one_change(first: str, at: int) -> Callable[[int, list[Actor]], Actor]:
    """Run `first` alone for so many steps, then the others as far as they come, then it again."""

    def choose(step: int, able: list[Actor]) -> Actor:
        mine = [actor for actor in able if (actor.name in (first, "supervisor")) == (step < at)]
        return (mine or able)[0]

    return choose


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("first", ["start", "other"])
def test_with_one_change_of_turns_at_every_step(home: Path, how: str, first: str) -> None:
    who = "start" if first == "start" else how
    steps, at = 1, 0
    while at <= steps:
        steps = play(home, [how], one_change(who, at))
        at += 1
    assert steps > 5


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=60), st.sampled_from(HOW), st.sampled_from(HOW))
def test_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, turns: list[int], one: str, other: str
) -> None:
    rest = iter(turns)
    home = tmp_path_factory.getbasetemp() / "interleaving"

    def choose(_: int, able: list[Actor]) -> Actor:
        return able[next(rest, 0) % len(able)]

    play(home, [one, other], choose)


@settings(max_examples=30, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_with_a_supervisor_that_is_killed(
    tmp_path_factory: pytest.TempPathFactory, turns: list[int]
) -> None:
    rest = iter(turns)
    home = tmp_path_factory.getbasetemp() / "interleaving"

    def choose(_: int, able: list[Actor]) -> Actor:
        return able[next(rest, 0) % len(able)]

    play(home, ["kill_supervisor", "stop"], choose)
