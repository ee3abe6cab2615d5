"""Hands nodes over to relays: nodes that carry what the head and others say to each other.

Each connection of the head's costs it memory, a descriptor, and the work of SSH. Of many nodes it
keeps those to the relays alone. A node whose relay is lost is reached by SSH again, as after any
lost connection: its stream goes on where the files here end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import Say, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.streams.authority import Authority
from orchestrator.head.follow.streams.relayed import RelayChannel, RelayedConnection
from orchestrator.head.nodes.facts import by_value
from orchestrator.node.follow.relay.signed import KEY_BYTES, Signed
from orchestrator.protocol.requests.follow import ComeIn, Door, OpenDoor, Place, Relay
from orchestrator.records.experiment import NodeRecord

BEHIND = 64  # nodes behind one relay
AT_ONCE = 8  # groups: whoever waits for a proof of the head's does not wait for thousands
TRIES = 2  # nodes of a group that are asked to be its relay
DOOR_SECONDS = 30.0  # that a node waits for its relay
CALL_SECONDS = 5.0
MEET_SECONDS = 10.0
ANSWER_SECONDS = 15.0


@dataclass(frozen=True)
class Open:
    """A node, and the head's own channel to it."""

    node: NodeRecord
    channel: NodeChannel

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return where others may reach it: where the ranks do, first."""
        known = (self.node.address, self.channel.connection.address)
        return tuple(filter(None, dict.fromkeys(known)))


def hand_over(opened: Sequence[Open], transport: Transport, say: Say) -> None:
    """Reach these nodes through relays among them; those for which that fails stay as they are."""
    direct = [each for each in opened if not isinstance(each.channel.connection, RelayedConnection)]
    switch = Switch(transport)
    every = list(groups(direct))
    failed: list[tuple[Open, str]] = []
    used: list[int] = []  # how many nodes are behind each relay
    for at in range(0, len(every), AT_ONCE):
        some = every[at : at + AT_ONCE]
        for group, result in zip(some, fleet.everywhere(some, switch.hand_over), strict=True):
            failed += (left := as_failed(result))
            used += [len(group) - 1 - len(left)] if len(left) < len(group) - 1 else []
    behind, total = sum(used), sum(used) + len(failed)
    if behind:
        verb = "is" if behind == 1 else "are"
        say(f"{plural(behind, 'node')} {verb} followed through {plural(len(used), 'other')}")
    if failed:
        say(f"{plural(len(failed), 'node')} of {total} cannot be reached through another one:")
        for line in fleet.reasons((node.name, why, "") for node, why in failed):
            say(f"  {line}")


def as_failed(result: list[tuple[Open, str]] | OrchestratorError) -> list[tuple[Open, str]]:
    if isinstance(result, OrchestratorError):
        raise result  # what a group raises is no node's failure
    return result


def groups(opened: Sequence[Open]) -> Iterator[list[Open]]:
    """Divide the nodes of each site into groups of those that are near each other."""
    near = sorted(opened, key=lambda each: (subnet(each.node.address), each.node.index))
    for some in by_value((each, each.node.site) for each in near).values():
        count = -(-len(some) // (BEHIND + 1))
        for number in range(count):
            yield some[number * len(some) // count : (number + 1) * len(some) // count]


def subnet(address: str) -> tuple[int, int]:
    """Return what addresses of one network have alike, as far as an address tells."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        return parsed.version, int(parsed) >> (8 if parsed.version == 4 else 64)
    return 0, 0


class Switch:
    """Hands one group after another over, all with certificates of one authority."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.authority = Authority()

    def hand_over(self, group: Sequence[Open]) -> list[tuple[Open, str]]:
        """Make a node of a group the relay of the others; return those that it does not reach."""
        why = ""
        for at in range(min(TRIES, len(group) - 1)):
            behind = [*group[:at], *group[at + 1 :]]
            try:
                return self.put_behind(group[at], behind)
            except OrchestratorError as error:  # the job runs, whatever it is
                why = f"{group[at].name} cannot be its relay: {error.what}"
        return [(each, why) for each in group[1:]]

    def put_behind(self, relay: Open, behind: Sequence[Open]) -> list[tuple[Open, str]]:
        channel = RelayChannel(relay.name, serving(self.transport, relay.node))
        entering = [Entering(each, channel, secrets.token_bytes(KEY_BYTES)) for each in behind]
        try:
            doors = self.open_doors(entering)
            request = Relay(
                places=tuple(door for door in doors if isinstance(door, Place)),
                identity=self.authority.identity("relay", calls=True),
                authority=self.authority.certificate,
                seconds=CALL_SECONDS,
            )
            answer = channel.channel.ask(request, 3 * CALL_SECONDS + ANSWER_SECONDS)
        except BaseException:
            channel.channel.connection.close()
            raise
        unreached = {each.number: NodeError(f"{relay.name} does not reach it: {each.why}")
                     for each in answer.unreached}  # fmt: skip
        doors = [unreached.get(each.number, door)
                 for each, door in zip(entering, doors, strict=True)]  # fmt: skip
        channel.begin()
        entered = fleet.everywhere(
            list(zip(entering, doors, strict=True)), lambda pair: pair[0].come_in(pair[1])
        )
        channel.full()
        return [(node, error.what) for node, error in fleet.failures(behind, entered)]

    def open_doors(self, entering: Sequence[Entering]) -> list[Place | OrchestratorError]:
        """Have nodes open their doors; return where each one is, or why there is none."""
        requests = [
            OpenDoor(
                identity=self.authority.identity(each.certified),
                authority=self.authority.certificate,
                key=each.key.hex(),
                seconds=DOOR_SECONDS,
            )
            for each in entering
        ]
        doors = fleet.ask([each.open for each in entering], requests, ANSWER_SECONDS)
        return [
            door if isinstance(door, OrchestratorError) else each.place(door)
            for each, door in zip(entering, doors, strict=True)
        ]


@dataclass(frozen=True)
class Entering:
    """A node on its way behind a relay."""

    open: Open
    relay: RelayChannel
    key: bytes  # by which it and the head sign what they say

    @property
    def number(self) -> int:
        return self.open.node.index

    @property
    def certified(self) -> str:
        """Return what its certificate says."""
        return f"node-{self.number}"

    def place(self, door: Door) -> Place:
        return Place(
            number=self.number,
            name=self.certified,
            addresses=self.open.addresses,
            port=door.port,
        )

    def come_in(self, door: Place | OrchestratorError) -> None:
        """Change from SSH to the relay; an error leaves everything as it was."""
        if isinstance(door, OrchestratorError):
            raise door
        channel, before = self.open.channel, self.open.channel.connection
        stream = self.relay.add(self.number, Signed(self.key, calls=True))
        try:
            stream.meet(MEET_SECONDS)
            with channel.sending:  # no beat may be on its way while the ways are changed
                channel.ask(ComeIn(), ANSWER_SECONDS)
                connection = RelayedConnection(stream, before.address)
                channel.change_ways(connection, stream, self.relay)
        except (OSError, NodeError) as error:
            stream.close()
            raise error if isinstance(error, NodeError) else NodeError(str(error)) from error
        before.close()
