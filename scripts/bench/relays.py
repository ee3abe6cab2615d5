"""Measure what nodes behind relays cost the head: 1,000 and 10,000 that answer the protocol.

    python scripts/bench/relays.py [--leaves 1000 10000] [--in-a-process 500]

The relays are processes of our own server, one for each 65 nodes, and the head is the real one. The
nodes behind them are simulated, many in a process: each has the real door with its certificate, TLS
and a port of its own, and answers. Nodes share the processors with the head, so `wall` is what all
took, `head` the processor time of the head's process alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ground import machine, progress, table

from orchestrator.head.connect import fleet, tasks
from orchestrator.head.connect.beats import beats
from orchestrator.head.connect.channel import DIRECT, NodeChannel
from orchestrator.head.connect.subprocess_transport import LocalTransport, ProcessChannel
from orchestrator.head.follow.streams import relays
from orchestrator.head.follow.streams.follower import Connected, Lost, News, NodeFollower
from orchestrator.head.follow.streams.node_logs import AppendOnly, NodeLogs
from orchestrator.head.follow.streams.relayed import RelayedConnection, RelayedStream
from orchestrator.node.follow.relay.door import Door, Guest
from orchestrator.node.peers.peers import listen
from orchestrator.node.server.visit import Refusal
from orchestrator.protocol import frames
from orchestrator.protocol.frames import JSON, Splitter
from orchestrator.protocol.message import decode, encode
from orchestrator.protocol.requests import follow
from orchestrator.protocol.requests.request import Beat, Heartbeat
from orchestrator.protocol.requests.transfer import OutputFiles, Outputs
from orchestrator.protocol.timing import RELAYED_BEAT
from orchestrator.records import experiments
from orchestrator.records.experiment import NodeRecord

ROUNDS = 5
SETTLE_SECONDS = 30.0  # until nodes that write nothing are seldom asked for it
REST_SECONDS = 2 * RELAYED_BEAT  # each has said something as often
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 0.2  # between two looks for heartbeats that are due


# -- the nodes ----------------------------------------------------------------------------------


class Leaf:
    """A simulated node: one channel, first to the head, then through a relay."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.splitter = Splitter()
        self.door: Door | None = None
        self.guest: Guest | None = None  # the relay through which it goes on
        self.next_beat = time.monotonic() + RELAYED_BEAT

    def say(self, *messages: dict[str, Any]) -> None:
        texts = [json.dumps(message).encode("ascii") for message in messages]
        data = b"".join(frames.header(JSON, len(text)) + text for text in texts)
        self.end.sendall(data if self.guest is None else self.guest.seal(data))

    def due(self, by: float) -> list[dict[str, Any]]:
        """Return the heartbeat, where it is due by then."""
        if by < self.next_beat:
            return []
        self.next_beat = time.monotonic() + RELAYED_BEAT
        return [encode(Heartbeat(beat=time.time()))]

    def serve(self, wanted: selectors.BaseSelector) -> None:
        came = None
        try:
            data = self.end.recv(1 << 16)
            hung_up = not data
            if self.guest is not None:
                data = self.guest.open(data)
            came = self.take(data)
        except OSError:  # the head has hung up
            hung_up = True
        if came is not None or hung_up:
            wanted.unregister(self.end)
            self.end.close()
        if came is not None:
            self.guest, self.door, self.end = came, None, came.caller
            wanted.register(self.end, selectors.EVENT_READ, self)
            self.take(came.said)

    def take(self, data: bytes) -> Guest | None:
        """Answer what the head says; return by whom it comes from now on, where that changes."""
        came, said = None, []
        for _, payload in self.splitter.feed(data):
            asked = json.loads(payload)
            number, do = asked.pop("id"), asked.pop("do")
            try:
                if do == follow.ComeIn.do and self.door is not None:
                    came = self.door.come_in()
                said.append({"id": number, "ok": self.answer(do, asked)})
            except Refusal as refusal:
                said.append({"id": number, "error": str(refusal)})
        if said:
            self.say(*said, *self.due(time.monotonic() + RELAYED_BEAT / 2))
        return came

    def answer(self, do: str, fields: dict[str, Any]) -> dict[str, Any]:
        if do == follow.OpenDoor.do:
            listener = listen(avoid=0)
            assert listener is not None
            self.door = Door(decode(follow.OpenDoor, fields), listener)
            return {"port": self.door.port}
        if do in (Beat.do, follow.Follow.do):
            return {"time": time.time()}
        return encode(OutputFiles(files=(), place="")) if do == Outputs.do else {}


def be_leaves(path: str, count: int) -> None:
    """Be so many nodes, until the head hangs up."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(count)
    wanted = selectors.DefaultSelector()
    leaves = [Leaf(server.accept()[0]) for _ in range(count)]
    for leaf in leaves:
        wanted.register(leaf.end, selectors.EVENT_READ, leaf)
    look = 0.0
    while wanted.get_map():
        for key, _ in wanted.select(LOOK_SECONDS):
            cast("Leaf", key.data).serve(wanted)
        if (now := time.monotonic()) < look:
            continue
        look = now + LOOK_SECONDS
        for leaf in leaves:
            if leaf.end.fileno() >= 0 and (due := leaf.due(now)):
                with suppress(OSError):  # the head has hung up, which is heard when it is read
                    leaf.say(*due)


# -- the head -----------------------------------------------------------------------------------


class Direct(NodeChannel):
    """The head's channel to a simulated node, as it is after the greeting."""

    def __init__(self, path: str) -> None:
        plain = socket.socket(socket.AF_UNIX)
        while plain.connect_ex(path):
            time.sleep(0.05)  # its process begins
        end = tasks.Socket.of(plain)
        self.connection = cast("Any", SimpleNamespace(address="127.0.0.1", close=end.close))
        self.channel = cast("Any", end)
        self.rest = memoryview(b"")
        self.sending = tasks.Lock()
        self.count, self.posted_at, self.pending = 0, 0.0, {}
        self.pace = DIRECT

    def _errors(self) -> str:
        return ""


def of_leaf(index: int) -> NodeRecord:
    return NodeRecord(index, f"leaf{index}", "localhost", None, None, "127.0.0.1", "", index, 1)


class Shared(AppendOnly):
    """A log of all nodes, as nothing is written: two files for each are more than some limits."""

    def close(self) -> None:
        pass


@contextmanager
def nodes(count: int, in_a_process: int) -> Iterator[list[relays.Open]]:
    """Have so many simulated nodes, each with a channel to the head."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        opened: list[relays.Open] = []
        while len(opened) < count:
            some = min(in_a_process, count - len(opened))
            path = f"{directory}/{len(opened)}"
            command = [sys.executable, __file__, "--be", path, str(some)]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            opened += [relays.Open(of_leaf(len(opened) + at), Direct(path)) for at in range(some)]
        yield opened


def measure(count: int, in_a_process: int) -> list[str]:
    os.environ["ORCHESTRATOR_HOME"] = tempfile.mkdtemp()
    with nodes(count, in_a_process) as opened:
        progress(f"{count} nodes wait")
        began, spent = time.monotonic(), time.process_time()
        relays.hand_over(opened, LocalTransport(), progress)
        over = time.monotonic() - began, time.process_time() - spent
        behind = [o for o in opened if isinstance(o.channel.connection, RelayedConnection)]
        progress(f"{len(behind)} are behind {count - len(behind)} relays")
        rounds = sorted(gather(behind) for _ in range(ROUNDS))
        wall, head = rounds[ROUNDS // 2]
        rest, size, most, lost = at_rest(behind)
    return [
        *(f"{count:,}", f"{count - len(behind):,}", f"{over[0]:.1f} s", f"{over[1]:.1f} s"),
        *(
            f"{wall:.2f} s",
            f"{head:.2f} s",
            f"{rest:.0%}",
            f"{size:.0f} MB",
            f"{most:.0f} MB",
            f"{lost:.1f} s",
        ),
    ]


def gather(opened: Sequence[relays.Open]) -> tuple[float, float]:
    """Ask all nodes and take all answers: seconds of all, and the head's own."""
    began, spent = time.monotonic(), time.process_time()
    answers = fleet.ask(cast("Any", opened), [Beat()] * len(opened), ANSWER_SECONDS)
    assert not fleet.failures(opened, answers), fleet.failures(opened, answers)[0][1]
    return time.monotonic() - began, time.process_time() - spent


def at_rest(opened: Sequence[relays.Open]) -> tuple[float, float, float, float]:
    """Follow all nodes at rest: the part of a core, the memory, and what it was at most."""
    experiment = experiments.create(Path(tempfile.mkdtemp()), "rest")
    files = (experiment.log(opened[0].node), experiment.ranks(opened[0].node))
    logs = NodeLogs(*map(Shared, files))
    news: Counter[type[News]] = Counter()
    followers = [
        NodeFollower(
            *(LocalTransport(), "job", each.node, experiment),
            *(lambda item: news.update([type(item)]), each.channel),
            logs=logs,
        )
        for each in opened
    ]
    for follower, each in zip(followers, opened, strict=True):
        beats.keep(each.channel)
        follower.start()
    while news[Connected] < len(opened):
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)
    spent, began = time.process_time(), time.monotonic()
    time.sleep(REST_SECONDS)
    used = (time.process_time() - spent) / (time.monotonic() - began)
    size = memory_mb("VmRSS"), memory_mb("VmHWM")
    assert not news[Lost], f"{news[Lost]} nodes were lost at rest"
    seconds = until_lost(opened[0], news)
    for follower in followers:
        follower.close()
    return used, *size, seconds


def until_lost(behind: relays.Open, news: Counter[type[News]]) -> float:
    """Stop a relay as it stands: the seconds until all followers of those behind it know."""
    relay = cast("RelayedStream", behind.channel.channel).relay
    process = cast("ProcessChannel", relay.channel.channel).process
    assert process is not None
    count, began = len(relay.streams), time.monotonic()
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        while news[Lost] < count:
            time.sleep(0.01)
        return time.monotonic() - began
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what nodes behind relays cost the head.")
    parser.add_argument("--leaves", nargs="+", type=int, default=[1000, 10000])
    parser.add_argument("--in-a-process", type=int, default=500)
    parser.add_argument("--be", nargs=2, metavar=("PATH", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.be:
        be_leaves(options.be[0], int(options.be[1]))
        return
    heading = ["nodes", "relays", "handed over", "head", "all asked", "head", "at rest", "memory",
               "at most", "relay lost"]  # fmt: skip
    rows = [measure(count, options.in_a_process) for count in options.leaves]
    print(f"{machine()}\n\n{table(heading, rows)}")


if __name__ == "__main__":
    main()
