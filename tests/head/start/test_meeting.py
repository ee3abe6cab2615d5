"""Three launches that meet on two nodes, in every order of their steps: one of them has both.

The head's own code decides what each asks next: it is played again from the answers that it has
had. A node here is what the book's locks make of it: each claim is granted whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import pytest

from orchestrator.head.start import claims
from orchestrator.head.start.claims import NodeClaim, hold_gpus
from orchestrator.protocol.requests.claims import RUNNING, STARTING, DeviceRequest, Taken
from orchestrator.protocol.requests.request import Nothing, Request
from orchestrator.protocol.requests.start import Claim, Claimed

USERS, NODES = 3, 2
ASKS, RUNS, LEFT, DEAD = "asks", "runs", "left", "dead"
Answer = tuple[str, ...]  # the states of those who have what was asked for; nothing: it is held


@dataclass(frozen=True)
class User:
    heard: tuple[tuple[Answer | None, ...], ...] = ()  # each time that it asked; None: to let go
    # These are answers to its current question; ASKS means not answered yet.
    now: tuple[Answer | str | None, ...] = ()
    state: str = ASKS


@dataclass(frozen=True)
class World:
    users: tuple[User, ...]
    # Each node's state by user: nothing, STARTING or RUNNING.
    held: tuple[tuple[str, ...], ...]
    kills: int


class NextAsked(Exception):
    """The head's code asks what has no answer yet."""


class Played:
    """The head's code of one launch, up to what it asks next, or to its end."""

    def __init__(self, order: Sequence[int]) -> None:
        # A node's channel is its number here.
        self.wanted = [NodeClaim(f"n{at}", cast(Any, at), DeviceRequest()) for at in order]

    def after(self, heard: Sequence[Sequence[Answer | None]]) -> Asked | bool:
        """Return what it asks of which nodes after these answers; at its end, whether it holds."""
        rest = iter(heard)

        def ask(channels: Sequence[Any], requests: Sequence[Request[Any]], _: float) -> list[Any]:
            asked = tuple(channels)
            answers = next(rest, None)
            if answers is None:
                raise NextAsked(Asked(asked, tuple(requests)))
            pairs = zip(asked, answers, strict=True)
            return [Nothing() if one is None else claimed(one, node) for node, one in pairs]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(claims.fleet, "ask_channels", ask)
            try:
                return not hold_gpus(self.wanted).missing
            except NextAsked as next_one:
                return cast(Asked, next_one.args[0])


@dataclass(frozen=True)
class Asked:
    nodes: tuple[int, ...]
    requests: tuple[Request[Any], ...]


def claimed(states: Answer, node: int) -> Claimed:
    taken = tuple(Taken(names=("slot 0",), user="ada", job="x", state=state) for state in states)
    return Claimed(held=not taken, taken=taken, machine=str(node))


class Model:
    """All that can happen. Each node has as many slots as `slots`; user i wants wants[i] there."""

    def __init__(self, slots: int, wants: Sequence[int]) -> None:
        self.slots, self.wants = slots, wants
        # Each head has its own list.
        listed = [(0, 1), (1, 0), (0, 1)]
        played = [Played(order) for order in listed]
        self.after = cache(lambda user, heard: played[user].after(heard))

    def steps(self, world: World) -> Iterator[World]:
        for at, user in enumerate(world.users):
            if user.state == ASKS:
                yield from self.asks(world, at, user)
                if world.kills:
                    held = tuple(put(node, at, "") for node in world.held)
                    gone = put(world.users, at, User(state=DEAD))
                    yield World(gone, held, world.kills - 1)
            elif user.state == RUNS:
                # The supervisors start one after the other.
                for node, held in enumerate(world.held):
                    if held[at] == STARTING:
                        yield replace(world, held=put(world.held, node, put(held, at, RUNNING)))

    def asks(self, world: World, at: int, user: User) -> Iterator[World]:
        asked = self.after(at, user.heard)
        if isinstance(asked, bool):
            yield replace(world, users=put(world.users, at, User(state=RUNS if asked else LEFT)))
            return
        now = user.now or (ASKS,) * len(asked.nodes)
        for place, (node, request) in enumerate(zip(asked.nodes, asked.requests, strict=True)):
            if now[place] == ASKS:
                for held, answer in self.answers(world.held[node], at, request):
                    after = put(now, place, answer)
                    new = replace(user, now=after)
                    if ASKS not in after:
                        new = User((*user.heard, cast(Any, after)))
                    users = put(world.users, at, new)
                    yield replace(world, users=users, held=put(world.held, node, held))

    def answers(
        self, held: tuple[str, ...], at: int, request: Request[Any]
    ) -> Iterator[tuple[tuple[str, ...], Answer | None]]:
        """Yield what a node answers at this moment; nothing while it waits for others."""
        if not isinstance(request, Claim):
            yield put(held, at, ""), None
            return
        free = self.slots - sum(self.wants[user] for user, state in enumerate(held) if state)
        taken = tuple(sorted(state for state in held if state))
        if free >= self.wants[at]:
            yield put(held, at, STARTING), ()
        elif not request.patience or STARTING not in taken:
            yield held, taken


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def ends(model: Model, kills: int) -> tuple[list[World], int]:
    """Return the worlds in which nothing more happens, and how many there are in all."""
    begin = World((User(),) * USERS, (("",) * USERS,) * NODES, kills)
    seen, waiting, found = {begin}, [begin], []
    while waiting:
        world = waiting.pop()
        following = list(model.steps(world))
        if not following:
            found.append(world)
        new = set(following) - seen
        seen |= new
        waiting += new
    return found, len(seen)


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize(("slots", "wants"), [(1, (1, 1, 1)), (2, (2, 1, 1)), (2, (2, 2, 1))])
def test_concurrent_claims_never_deadlock_or_overlap(
    slots: int, wants: tuple[int, ...], kills: int
) -> None:
    found, worlds = ends(Model(slots, wants), kills)
    assert worlds > 200 and found
    for world in found:
        states = [user.state for user in world.users]
        # Each would wait for the other until its timeout.
        assert ASKS not in states, world
        assert RUNS in states, world
        for at, state in enumerate(states):
            has = {held[at] for held in world.held}
            assert has == ({RUNNING} if state == RUNS else {""}), world
        used = [sum(wants[at] for at, has in enumerate(held) if has) for held in world.held]
        assert max(used) <= slots, world
    # Where two fit beside each other, it happens that both run.
    both = any([user.state for user in world.users].count(RUNS) == 2 for world in found)
    assert both is (slots == 2 and wants.count(1) > 1)
