import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel, Silent
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.subprocess_transport import ProcessChannel, ProcessConnection
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import failures
from orchestrator.head.screen.failures import failure_table
from orchestrator.node.machine.reachability import ARRIVED, BULK_BYTES
from orchestrator.protocol.requests.machine import Dial, Dialed
from orchestrator.protocol.requests.request import Ping
from tests.node.running import PATIENCE


def test_failure_table_names_each_node_and_fix() -> None:
    failed = [
        (Node("gpu1"), NodeError("it refuses connections", "is sshd running?")),
        (Node("gpu12", user="bob"), NodeError("no answer")),
        (Node("gpu2"), NodeError("it refuses connections", "is sshd running?")),
    ]
    assert failure_table(failed, 8, "; nothing was started") == (
        "3 of 8 nodes cannot be used; nothing was started\n"
        "  gpu1       it refuses connections\n"
        "  gpu2       it refuses connections\n"
        "               -> is sshd running?\n"
        "  bob@gpu12  no answer"
    )


def test_failure_table_merges_equal_failures() -> None:
    error = NodeError("it refuses connections", "is sshd running?")
    failed = [(Node(f"gpu{number}"), error) for number in range(1, 20)]
    assert failure_table(failed, 20, "").splitlines()[1:] == [
        "  gpu[1-19]  it refuses connections",
        "               -> is sshd running?",
    ]


def test_failure_table_shows_one_example_for_many_fixes() -> None:

    def table(count: int) -> list[str]:
        numbers = range(1, count + 1)
        denied = [
            NodeError("it denies ada every key", f"ssh-copy-id ada@10.0.0.{n}") for n in numbers
        ]
        names = [Node(f"gpu{n}") for n in numbers]
        return failure_table(list(zip(names, denied, strict=True)), count, "").splitlines()[1:]

    assert table(2) == [
        "  gpu1  it denies ada every key",
        "          -> ssh-copy-id ada@10.0.0.1",
        "  gpu2  it denies ada every key",
        "          -> ssh-copy-id ada@10.0.0.2",
    ]
    assert table(200) == [
        "  gpu[1-200]  it denies ada every key",
        "                -> ssh-copy-id ada@10.0.0.1  # for each of them, with its name",
    ]


FEW_FILES = """
import resource, socket
from orchestrator.common.errors import UsageError
from orchestrator.head.connect import fleet
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
opened = []
def connect(number):
    opened.append(socket.socket())
    return number
try:
    fleet.need_room_for_nodes(range(100))
except UsageError as error:
    print(error)
for result in fleet.map_parallel(range(100), connect):
    print(result)
"""


def test_connect_explains_limit_of_open_files() -> None:
    """Before anything is begun where that can be known; else each node that found no room."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[0] == (
        "100 nodes cannot be connected to at once: this process may open only 64 files"
    )
    assert "ulimit -n" in said[1]
    connected = [line for line in said[2:] if line.isdigit()]
    refused = [line for line in said[2:] if line == "this process may open no more files"]
    assert connected and len(connected) + len(refused) == 100


@pytest.fixture
def channels() -> Iterator[list[NodeChannel]]:
    """Three nodes: servers of this machine."""
    here = Node("here", python=sys.executable)
    opened = [open_channel(ProcessConnection((), ""), here, PATIENCE) for _ in range(3)]
    yield opened
    for each in opened:
        each.connection.close()


def answer_together(listener: socket.socket, count: int) -> None:
    """Answer the callers once all of them have connected."""
    callers = [listener.accept()[0] for _ in range(count)]
    for caller in callers:
        with caller:
            caller.sendall(b"word")
            left = BULK_BYTES
            while left:
                left -= len(caller.recv(left))
            caller.sendall(ARRIVED)


def test_ask_channels_asks_all_nodes_at_once(channels: list[NodeChannel]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(
            target=answer_together, args=(listener, len(channels)), daemon=True
        ).start()
        place = ("127.0.0.1", listener.getsockname()[1], "word")
        dial = Dial(places=(place,), seconds=PATIENCE)
        answers = fleet.ask_channels(channels, [dial] * len(channels), 2 * PATIENCE)
    assert not failures.failed_nodes([Node("here")] * len(answers), answers)
    assert [cast("Dialed", answer).answers for answer in answers] == [("",)] * len(channels)


def test_ask_channels_returns_answers_despite_silent_nodes(
    channels: list[NodeChannel],
) -> None:
    silent, quick, closed = channels
    process = cast("ProcessChannel", silent.channel).process
    assert process is not None
    closed.channel.close()
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        answers = fleet.ask_channels(channels, [Ping()] * 3, 3.0)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    assert [type(answer) for answer in answers] == [Silent, Ping.answer, NodeError]
    assert "within 3 s" in str(answers[0])
    assert quick.ask(Ping(), PATIENCE)
