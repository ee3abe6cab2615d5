"""Nodes behind a relay: real servers on this machine, real TLS between relay and node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from orchestrator.common.errors import CheckFailed, NodeError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import DIRECT, RELAYED, Declined, NodeChannel, Silent
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.subprocess_transport import LocalTransport, ProcessChannel
from orchestrator.head.follow.streams import relayed, relays
from orchestrator.head.follow.streams.authority import Authority
from orchestrator.head.follow.streams.relayed import RelayedConnection, RelayedStream
from orchestrator.node.follow.relay import door as doors
from orchestrator.node.follow.relay.sealed import Sealed, context, some
from orchestrator.node.follow.relay.signed import KEY_BYTES, Signed
from orchestrator.protocol import frames
from orchestrator.protocol.frames import WINDOW_BYTES, Load
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import OpenDoor
from orchestrator.protocol.requests.request import Beat, Clock, Request
from orchestrator.protocol.requests.transfer import Files, Output
from orchestrator.protocol.timing import RELAY_PATIENCE_SECONDS, SERVER_BEAT
from orchestrator.records.experiment import NodeRecord
from tests.node.running import PATIENCE, wait_until

LOCAL = LocalTransport()
BIG = os.urandom(WINDOW_BYTES * 3)


class Refusing(LocalTransport):
    def connect(self, destination: Any, timeout: float | None = None) -> NoReturn:
        raise CheckFailed("no more connections")


def node_of(index: int, address: str = "127.0.0.1") -> NodeRecord:
    return NodeRecord(index, f"node{index}", "localhost", None, None, address, "", index, 1)


@pytest.fixture
def open_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], list[relays.Open]]]:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    made: list[relays.Open] = []

    def make(count: int) -> list[relays.Open]:
        made.extend(relays.Open(node_of(at), serving(LOCAL, node_of(at))) for at in range(count))
        return made

    yield make
    for each in made:
        each.channel.connection.close()


@pytest.fixture
def behind(open_nodes: Callable[[int], list[relays.Open]]) -> list[relays.Open]:
    """Three nodes, the first of which is the relay of the others."""
    said: list[str] = []
    opened = open_nodes(3)
    relays.hand_over(opened, LOCAL, said.append)
    assert said == ["2 nodes are followed through 1 other"]
    assert [is_relayed(each) for each in opened] == [False, True, True]
    return opened


def is_relayed(each: relays.Open) -> bool:
    return isinstance(each.channel.connection, RelayedConnection)


def stream_of(each: relays.Open) -> RelayedStream:
    return cast("RelayedStream", each.channel.channel)


def server_pid(channel: NodeChannel) -> int:
    """The process at the other end of a channel that no relay carries."""
    process = cast("ProcessChannel", channel.channel).process
    assert process is not None
    return process.pid


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ask(each: relays.Open, request: Request[Any]) -> Message:
    return cast("Message", each.channel.ask(request, PATIENCE))


def test_who_is_behind_a_relay_is_asked_less_often(behind: Sequence[relays.Open]) -> None:
    assert [each.channel.pace for each in behind] == [DIRECT, RELAYED, RELAYED]


def test_what_is_large_passes_in_both_directions(
    behind: Sequence[relays.Open], tmp_path: Path
) -> None:
    """Neither end sends more than a window ahead, and every byte arrives."""
    (tmp_path / "big").write_bytes(BIG)
    for each in behind[1:]:
        each.channel.put(BIG, PATIENCE)
        ask(each, Beat())  # answered after all that came before
        listed = each.channel.ask(Files(path=str(tmp_path / "big"), directory="/"), PATIENCE)
        offsets = range(0, len(BIG), 1 << 19)
        asked = [Output(place=listed.place, path="big", offset=offset) for offset in offsets]
        numbers = [each.channel.post(request) for request in asked]
        pairs = zip(numbers, asked, strict=True)
        answers = [each.channel.wait_for(number, request, PATIENCE) for number, request in pairs]
        assert sha(b"".join(answer.data for answer in answers)) == sha(BIG)


def test_questions_to_all_behind_a_relay_reach_it_in_one_piece(
    behind: Sequence[relays.Open], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = stream_of(behind[1]).relay
    pieces: list[bytes] = []
    put = relay.channel.put_frame
    monkeypatch.setattr(
        relay.channel, "put_frame", lambda piece: (pieces.append(piece), put(piece))
    )
    answers = fleet.ask(behind[1:], [Beat()] * 2, PATIENCE)
    assert [type(answer) for answer in answers] == [Clock, Clock]
    assert len(pieces) == 1


def test_questions_to_all_may_be_larger_than_what_a_relay_takes(
    behind: Sequence[relays.Open],
) -> None:
    questions = [Files(path="x" * (3 * WINDOW_BYTES), directory="/")] * 2
    answers = fleet.ask(behind[1:], questions, PATIENCE)
    assert [type(answer) for answer in answers] == [Declined, Declined]


def test_one_that_is_not_read_holds_up_no_other(
    behind: Sequence[relays.Open], tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(BIG)
    _, slow, quick = behind
    listed = slow.channel.ask(Files(path=str(tmp_path / "big"), directory="/"), PATIENCE)
    for _ in range(20):
        slow.channel.post(Output(place=listed.place, path="big", offset=0))
    stream = stream_of(slow)
    full = WINDOW_BYTES - stream.taken
    wait_until(lambda: sum(map(len, stream.came)) == full, "a full window")
    for _ in range(3):
        ask(quick, Beat())
    assert sum(map(len, stream.came)) == full


def test_a_relay_that_is_killed_is_named(behind: Sequence[relays.Open]) -> None:
    relay = stream_of(behind[1]).relay
    os.killpg(server_pid(relay.channel), signal.SIGKILL)
    for each in behind[1:]:
        with pytest.raises(NodeError, match="its relay node0 is lost"):
            ask(each, Beat())
    ask(behind[0], Beat())  # its own channel is another


def test_a_relay_that_is_silent_is_lost(behind: Sequence[relays.Open]) -> None:
    """It has three beats for a word, and all behind it hear of its end at once."""
    assert RELAY_PATIENCE_SECONDS >= 3 * SERVER_BEAT
    pid = server_pid(stream_of(behind[1]).relay.channel)
    os.killpg(pid, signal.SIGSTOP)
    try:
        for each in behind[1:]:
            with pytest.raises(NodeError, match="its relay node0 is lost: no word for 3 s"):
                ask(each, Beat())
    finally:
        os.killpg(pid, signal.SIGCONT)


class Reading:
    """The head's channel to a relay, from which bytes come as they are listed; 0: none in time."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.rest = list(sizes), b""

    def read(self, deadline: float, silence: str) -> bytes:
        self.rest += bytes(self.sizes.pop(0))
        if len(self.rest) < 4:
            raise Silent(silence)
        return self.rest


@pytest.mark.parametrize("sizes", [(4,), (0, 4), (0, 1, 0, 1, 0, 2), (1, 1, 1, 1)])
def test_a_relay_whose_bytes_come_slowly_is_not_lost(sizes: Sequence[int]) -> None:
    """Nor is one whose word lies here while the head was held up for longer than it waits."""
    channel = Reading(*sizes)
    relay = relayed.RelayChannel("node0", cast("Any", channel))
    assert relay.patiently(channel.read) == bytes(4)
    channel = Reading(3, 0, 0, 1)
    relay = relayed.RelayChannel("node0", cast("Any", channel))
    with pytest.raises(Silent):
        relay.patiently(channel.read)


def test_a_node_whose_server_ends_is_lost_alone(
    open_nodes: Callable[[int], list[relays.Open]],
) -> None:
    opened = open_nodes(3)
    pid = server_pid(opened[1].channel)
    relays.hand_over(opened, LOCAL, print)
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises(NodeError, match="its relay lost it"):
        ask(opened[1], Beat())
    ask(opened[2], Beat())


def test_a_relay_that_forges_a_word_is_found_out(behind: Sequence[relays.Open]) -> None:
    stream = stream_of(behind[1])
    said = Signed(secrets.token_bytes(KEY_BYTES), calls=False).seal(b"all is well")
    stream.deliver(Load(stream.node, 0, False, said))
    with pytest.raises(NodeError, match="what came through its relay is not what it said"):
        ask(behind[1], Beat())
    ask(behind[2], Beat())


@pytest.mark.parametrize("size", [1 << 17, 1])
def test_a_relay_that_brings_more_than_was_asked_for_is_lost(size: int) -> None:
    """Nobody reads a stream while the disk is full here: what comes then would fill the memory."""
    loads = [Load(7, 0, False, bytes(size)).frame()] * (3 * WINDOW_BYTES // size)
    bytes_ = memoryview(b"".join(loads))
    left = len(bytes_)

    def exactly(wanted: int, _: float, __: str) -> bytes:
        nonlocal left
        data = bytes_[len(bytes_) - left :][:wanted]
        left -= wanted
        return bytes(data)

    def header(deadline: float, silence: str) -> tuple[bytes, int]:
        return frames.parse_header(exactly(frames.HEADER.size, deadline, silence))

    ends = SimpleNamespace(close=lambda: None)
    sent: list[bytes] = []
    channel = SimpleNamespace(
        header=header, exactly=exactly, rest=b"", connection=ends, put_frame=sent.append
    )
    relay = relayed.RelayChannel("node0", cast("Any", channel))
    stream = relay.add(7, Signed(secrets.token_bytes(KEY_BYTES), calls=True))
    relay.read()
    assert stream.broken == "its relay node0 is lost: it brings more than was asked for"
    assert sum(map(len, stream.came)) <= WINDOW_BYTES + size
    began = time.monotonic()
    with pytest.raises(ConnectionError):  # what it brought has no signature of the node's
        while True:
            stream.recv(1)
    assert time.monotonic() - began < 1.0


def test_the_relay_goes_with_the_last_node_behind_it(behind: Sequence[relays.Open]) -> None:
    channel = stream_of(behind[1]).relay.channel
    process = cast("ProcessChannel", channel.channel).process
    assert process is not None
    behind[1].channel.connection.close()
    assert process.poll() is None
    behind[2].channel.connection.close()
    assert process.wait(PATIENCE) == 0


def test_a_node_that_the_relay_does_not_reach_stays_as_it_is(
    open_nodes: Callable[[int], list[relays.Open]],
) -> None:
    opened = open_nodes(3)
    opened[2] = replace(opened[2], node=node_of(2, "192.0.2.1"))  # nobody has this address
    said: list[str] = []
    unroutable = opened[2].addresses
    assert unroutable == ("192.0.2.1",)
    relays.hand_over(opened, LOCAL, said.append)
    assert sum(map(is_relayed, opened)) == 1
    assert said[1] == "1 node of 2 cannot be reached through another one:"
    assert "does not reach it" in said[2]
    for each in opened:
        ask(each, Beat())


def test_without_a_relay_everything_stays_as_it_is(
    open_nodes: Callable[[int], list[relays.Open]],
) -> None:
    opened = open_nodes(3)
    said: list[str] = []
    relays.hand_over(opened, Refusing(), said.append)
    assert "cannot be its relay: no more connections" in "\n".join(said)
    for each in opened:
        assert not is_relayed(each)
        ask(each, Beat())


def test_a_group_without_a_relay_counts_as_none(
    open_nodes: Callable[[int], list[relays.Open]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "BEHIND", 1)
    opened = open_nodes(4)
    honest = relays.serving
    refused = {opened[2].name, opened[3].name}  # the second group

    def serve(transport: Any, node: NodeRecord) -> NodeChannel:
        return honest(Refusing() if node.name in refused else transport, node)

    monkeypatch.setattr(relays, "serving", serve)
    said: list[str] = []
    relays.hand_over(opened, LOCAL, said.append)
    assert said[:2] == [
        "1 node is followed through 1 other",
        "1 node of 2 cannot be reached through another one:",
    ]


@pytest.mark.parametrize(
    ("swapped", "why"),
    [
        (["port"], "certificate"),  # which an honest relay sees
        (["port", "name"], "its relay lost it"),  # the node does not take what another is to hear
    ],
)
def test_a_relay_that_leads_elsewhere_is_found_out(
    open_nodes: Callable[[int], list[relays.Open]],
    monkeypatch: pytest.MonkeyPatch,
    swapped: Sequence[str],
    why: str,
) -> None:
    """It connects the head with another node than the one that it wants: they stay as they are."""
    opened = open_nodes(3)
    honest = relays.Switch.open_doors

    def crossed(self: relays.Switch, entering: Sequence[relays.Entering]) -> Any:
        places = cast("Any", honest(self, entering))
        return [
            place.replace(**{field: getattr(other, field) for field in swapped})
            for place, other in zip(places, reversed(places), strict=True)
        ]

    monkeypatch.setattr(relays.Switch, "open_doors", crossed)
    said: list[str] = []
    relays.hand_over(opened, LOCAL, said.append)
    assert not any(map(is_relayed, opened))
    assert why in "\n".join(said)
    for each in opened:
        ask(each, Beat())


def test_the_first_that_does_not_come_in_takes_no_other_with_it(
    open_nodes: Callable[[int], list[relays.Open]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay stays while others are on their way."""
    opened = open_nodes(3)
    first_is_over = threading.Event()
    meet = RelayedStream.meet

    def one_fails(self: RelayedStream, seconds: float) -> None:
        if self.node == 1:
            self.close()
            first_is_over.set()
            raise OSError("it does not come")
        first_is_over.wait(PATIENCE)
        self.relay.streams[self.node] = self
        meet(self, seconds)

    monkeypatch.setattr(RelayedStream, "meet", one_fails)
    add = relayed.RelayChannel.add

    def added(self: relayed.RelayChannel, node: int, signed: Signed) -> RelayedStream:
        stream = add(self, node, signed)
        if node == 2:
            del self.streams[node]  # as where it is not that far
        return stream

    monkeypatch.setattr(relayed.RelayChannel, "add", added)
    relays.hand_over(opened, LOCAL, print)
    assert [is_relayed(each) for each in opened] == [False, False, True]
    ask(opened[2], Beat())


def test_a_second_hand_over_leaves_those_that_are_behind_a_relay(
    behind: Sequence[relays.Open],
) -> None:
    streams = [stream_of(each) for each in behind[1:]]
    relays.hand_over(behind, LOCAL, print)
    assert [stream_of(each) for each in behind[1:]] == streams


def test_neighbours_are_behind_one_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "BEHIND", 2)
    channel = cast("Any", SimpleNamespace(connection=SimpleNamespace(address="")))
    opened = [relays.Open(node_of(at, f"10.0.{at % 2}.{at}"), channel) for at in range(6)]
    numbers = [[each.node.index for each in group] for group in relays.groups(opened)]
    assert numbers == [[0, 2, 4], [1, 3, 5]]
    sizes = [len(group) for group in relays.groups(opened[:5])]
    assert sizes == [2, 3]
    opened = [
        replace(each, node=replace(each.node, site=site))
        for each, site in zip(opened, ["a", "b", "a", "a", "b", ""], strict=True)
    ]
    numbers = [[each.node.index for each in group] for group in relays.groups(opened)]
    assert numbers == [[0, 2, 3], [4, 1], [5]]


# -- the door -----------------------------------------------------------------------------------


class Knocking:
    """A door as a node has it, and ways to call there."""

    def __init__(self, seconds: float = PATIENCE) -> None:
        self.authority = Authority()
        self.key = secrets.token_bytes(KEY_BYTES)
        request = OpenDoor(
            identity=self.authority.identity("node-1"),
            authority=self.authority.certificate,
            key=self.key.hex(),
            seconds=seconds,
        )
        listener = doors.listen(avoid=0)
        assert listener is not None
        self.door = doors.Door(request, listener)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.door.port), PATIENCE)

    def prove(self, identity: str, name: str = "node-1", key: bytes = b"") -> None:
        """Do what relay and head do, with this certificate and key, until the door hangs up."""
        sealed = Sealed(context(identity, self.authority.certificate, calls=True), name)
        signed = Signed(key or self.key, calls=True)
        deadline = time.monotonic() + PATIENCE
        with self.call() as caller:
            sealed.agree(caller, deadline)
            caller.sendall(sealed.seal(signed.seal(b"it is me")))
            while True:
                signed.open(sealed.open(some(caller, deadline)))

    def come(self) -> bytes:
        """Come in as the head, through a relay; return what it is heard to say."""
        relay = self.authority.identity("relay", calls=True)

        def prove() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                self.prove(relay)

        threading.Thread(target=prove, daemon=True).start()
        guest = self.door.come_in()
        said = guest.said
        with guest.caller:
            while not said:
                said = guest.open(some(guest.caller, time.monotonic() + PATIENCE))
        return said


def test_nobody_but_the_head_comes_in() -> None:
    knocking = Knocking()
    other, door = Authority(), knocking.door
    with knocking.call() as silent, knocking.call() as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        relay = knocking.authority.identity("relay", calls=True)
        for stranger in (
            other.identity("relay", calls=True),  # signed by somebody else
            knocking.authority.identity("node-2"),  # another node of the job
        ):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                knocking.prove(stranger)
        with pytest.raises(ConnectionError):  # a relay without the head behind it
            knocking.prove(relay, key=secrets.token_bytes(KEY_BYTES))
        with pytest.raises(ssl.SSLCertVerificationError):  # the relay would see another node
            knocking.prove(relay, "node-2")
        assert not door.came.is_set()
        assert knocking.come() == b"it is me"
        wait_until(lambda: door.listener.fileno() < 0, "the end of the door")
        with pytest.raises(OSError):
            knocking.call()
        silent.settimeout(0)


def test_a_crowd_of_strangers_is_sent_away_and_the_head_comes_in_later() -> None:
    knocking = Knocking()
    crowd = [knocking.call() for _ in range(doors.STRANGERS + 4)]
    poll = select.poll()
    for each in crowd:
        poll.register(each, select.POLLIN)
    wait_until(lambda: len(poll.poll(0)) == 4, "the last ones being sent away")
    for each in crowd:
        each.close()
    wait_until(lambda: knocking.door.places._value == doors.STRANGERS, "room at the door")
    assert knocking.come() == b"it is me"


def test_a_door_is_closed_when_it_is_time() -> None:
    knocking = Knocking(seconds=0.2)
    began = time.monotonic()
    wait_until(lambda: knocking.door.listener.fileno() < 0, "the end of the door")
    assert time.monotonic() - began >= 0.1
    with pytest.raises(OSError):
        knocking.call()
