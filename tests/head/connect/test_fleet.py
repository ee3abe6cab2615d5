from __future__ import annotations

import subprocess
import sys

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.fleet import failure_table
from orchestrator.head.nodes.node_list import Node


def test_every_node_that_failed_is_named_with_its_fix() -> None:
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


def test_many_nodes_that_failed_alike_share_a_line() -> None:
    error = NodeError("it refuses connections", "is sshd running?")
    failed = [(Node(f"gpu{number}"), error) for number in range(1, 20)]
    assert failure_table(failed, 20, "").splitlines()[1:] == [
        "  gpu[1-19]  it refuses connections",
        "               -> is sshd running?",
    ]


def test_many_nodes_whose_fix_names_them_have_one_example() -> None:
    """A few have each fix as it is to be typed; hundreds have the first."""

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
    fleet.need_room_for(range(100))
except UsageError as error:
    print(error)
for result in fleet.everywhere(range(100), connect):
    print(result)
"""


def test_what_opens_more_files_than_this_process_may_fails_in_words() -> None:
    """Before anything is begun where that can be known; else each node that found no room."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[0] == (
        "100 nodes cannot be connected to at once: 64 files are all that this process may open"
    )
    assert "ulimit -n" in said[1]
    connected = [line for line in said[2:] if line.isdigit()]
    refused = [line for line in said[2:] if line == "no more files may be opened here"]
    assert connected and len(connected) + len(refused) == 100
