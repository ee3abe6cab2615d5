"""A job by hand: the same command on each machine, its part in the environment."""

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.launchers import run_node as by_hand
from orchestrator.launchers.run_node import Master, why_not_one_job
from orchestrator.protocol.control import Agreed, Hello, Reply, message_to_frame, read_frame
from orchestrator.protocol.frames import JSON, frame_header
from orchestrator.protocol.message import decode_value
from tests.clusters.slurm import free_ports, with_variable
from tests.launching import BIN, Command
from tests.node.running import wait_until

ENDLESS = """
import sys, time
print("begun with", sys.argv[1:], flush=True)
time.sleep(600)
"""
ADD = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]))
dist.all_reduce(total)
place = os.environ["ORCHESTRATOR_EXPERIMENT"]
print("sum", total.item(), os.environ["NODE_RANK"], place, sys.argv[1:])
"""


class Machines:
    """Two machines with a user at each terminal; here they are one machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = str(free_ports(1)[0])

    def command(self, *words: str, **env: str) -> Command:
        home = {"ORCHESTRATOR_HOME": str(self.directory / "home")}
        return Command(words, self.directory, {**home, **env})

    def node(self, rank: int, *words: str, **env: str) -> Command:
        who = {"NODE_RANK": str(rank), "NNODES": "2", "NPROC_PER_NODE": "1"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        return self.command(
            str(BIN / "orchestrator"), "run-node", *words, **{**place, **who, **env}
        )

    def script(self, text: str) -> str:
        (self.directory / "job.py").write_text(text)
        return "job.py"

    def record(self, name: str) -> dict[str, Any]:
        (path,) = self.directory.glob(f"experiments/{name}_[0-9]*/job.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


@pytest.mark.cluster
def test_two_nodes_by_hand_form_one_job(machines: Machines) -> None:
    """Different numbers of ranks, arguments as they are, one experiment; an early bird waits."""
    name = machines.script(ADD)
    second = machines.node(1, name, "two words", NPROC_PER_NODE="2")
    second.wait_for("node 0 cannot be reached at 127.0.0.1")
    first = machines.node(0, name, "two words")
    assert (first.finish(), second.finish()) == (0, 0), first.text + second.text
    assert "node 0 of 2: rank 0 of 3" in first.text
    assert "node 1 of 2: ranks 1 to 2 of 3" in second.text
    place = machines.record("job")["experiment"]
    assert f"node0 rank0 | sum 3.0 0 {place} ['two words']" in first.text
    for rank in (1, 2):
        assert f"node1 rank{rank} | sum 3.0 1 {place} ['two words']" in second.text
    assert machines.record("job-node1")["state"] == "done"
    assert "sum 3.0" in next(Path(place).glob("logs/node_0_*.txt")).read_text()


@pytest.mark.cluster
def test_failure_ends_all_nodes(machines: Machines) -> None:
    name = machines.script(
        "import os, time\n"
        "if os.environ['NODE_RANK'] == '1': raise ValueError('of its own')\n"
        "time.sleep(600)\n"
    )
    first, second = (machines.node(rank, "--no-torchrun", name) for rank in (0, 1))
    assert (first.finish(), second.finish()) == (1, 1), first.text + second.text
    assert "the cause: rank 1 on node 1" in second.text
    assert "ValueError: of its own" in second.text
    assert "rank 1 on node 1 failed; this node ends its part" in first.text
    assert machines.record("job")["verdict"]["kind"] == "elsewhere"
    # A supervisor may need a moment to leave after its last word.
    wait_until(
        lambda: not with_variable(f"ORCHESTRATOR_HOME={machines.directory}/home"),
        "the end of all processes",
    )


@pytest.mark.cluster
def test_disagreeing_nodes_start_nothing(machines: Machines) -> None:
    name = machines.script(ENDLESS)
    both = [machines.node(0, name), machines.node(1, name, NNODES="3")]
    assert [command.finish() for command in both] == [3, 3], both[0].text + both[1].text
    for command in both:
        assert "NNODES is 2 on node 0" in command.text
    assert not (machines.directory / "experiments").exists()


@pytest.mark.cluster
def test_missing_node_is_named(machines: Machines) -> None:
    name = machines.script(ENDLESS)
    alone = machines.command(
        *(str(BIN / "orchestrator"), "run-node", "--wait", "1", name),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": machines.port},
        **{"NNODES": "3", "NODE_RANK": "0"},
    )
    assert alone.finish() == 3
    assert "NODE_RANK 1, 2 did not arrive within 1 s" in alone.text


# -- pure ------------------------------------------------------------------------------------------

GOOD = {"MASTER_ADDR": "10.0.0.1", "NNODES": "2", "NODE_RANK": "1"}


def test_part_is_read_from_environment() -> None:
    assert by_hand.read_part(GOOD) == by_hand.MachinePart("10.0.0.1", 29500, 2, 1, None)
    assert by_hand.read_part({"NNODES": "1"}) == by_hand.MachinePart("127.0.0.1", 29500, 1, 0, None)
    assert by_hand.read_part({**GOOD, "MASTER_ADDR": "[fd00::1]"}).master == "fd00::1"
    indexed = {"MASTER_ADDR": "run-0.run", "NNODES": "2", "JOB_COMPLETION_INDEX": "1"}
    assert by_hand.read_part(indexed) == by_hand.MachinePart("run-0.run", 29500, 2, 1, None)
    assert by_hand.read_part({**indexed, "NODE_RANK": "1"}).rank == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"NODE_RANK": None}, "NODE_RANK is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"NNODES": None}, "NNODES is not set"),
        ({"NODE_RANK": "two"}, "NODE_RANK is 'two'; it must be a number from 0 up"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2, but with NNODES=2 the last is 1"),
        ({"NODE_RANK": None, "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX is 2, but with"),
        ({"NNODES": "0"}, "NNODES is '0'; it must be a number from 1 up"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; it must be a number from 1 up"),
        ({"NPROC_PER_NODE": "-1"}, "NPROC_PER_NODE is '-1'; it must be a number from 1 up"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE is 'all'; it must be a number from 1 up"),
    ],
)
def test_missing_or_invalid_variable_is_named(change: dict[str, str | None], words: str) -> None:
    merged = {**GOOD, **change}
    with pytest.raises(UsageError) as refused:
        by_hand.read_part({name: value for name, value in merged.items() if value is not None})
    assert words in str(refused.value)


def hello(rank: int, **changes: Any) -> Hello:
    return Hello(**{**{"rank": rank, "nnodes": 2, "nproc": 2, "host": f"h{rank}"}, **changes})


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([hello(0), hello(1)], ""),
        ([hello(0)], ""),
        ([hello(0), hello(1, world=4)], ""),
        ([hello(0), hello(1, world=2)], "WORLD_SIZE is 2 on node 1 (h1), but all nodes together"),
        ([hello(0), hello(1, nnodes=3)], "NNODES is 2 on node 0 (h0) and 3 on node 1 (h1)"),
        ([hello(0), hello(0, host="x")], "NODE_RANK is 0 twice: on h0 and on x"),
        ([hello(0, program="a.py"), hello(1, program="b.py")], "node 0 (h0) starts a.py, and"),
    ],
)
def test_disagreement_names_difference(nodes: list[Hello], words: str) -> None:
    found = why_not_one_job(nodes)
    assert found.startswith(words) if words else found == ""


# -- strangers ------------------------------------------------------------------------------------


def good(nproc: int = 2) -> Agreed:
    return Agreed(job="run-1", experiment="/x", counts=(2, nproc), token="ab", peers_port=0)


def dial(port: int, says: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(says)
    return client


STRANGERS = [
    *(b"\n\n\n\n\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"GET / HTTP/1.0\r\n\r\n", b'{"rank": 1}\n'),
    frame_header(JSON, (1 << 16) + 1),
    *(
        frame_header(JSON, len(text)) + text
        for text in (
            *(b"", b"null", b"\xff", b"[" * 30_000, b'{"orchestrator": 1}'),
            b'{"rank": "one", "nnodes": 2, "nproc": 2, "host": "h"}',
        )
    ),
]


def test_strangers_at_node_0_are_rejected() -> None:
    """The node that belongs to the job is heard, also where it has been there before."""
    (port,) = free_ports(1)
    with Master(hello(0), port) as master:
        strangers = [dial(port, says) for says in STRANGERS]
        found: list[list[Hello]] = []
        gathering = threading.Thread(target=lambda: found.append(master.gather(300)))
        gathering.start()
        for client in strangers:
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b"", "it was not sent away"
            client.close()
        with dial(port, message_to_frame(hello(1))) as second:
            gathering.join()
            master.send(Reply(go=good()))
            assert decode_value(Reply, read_frame(second)) == Reply(go=good())
        assert found == [[hello(0), hello(1)]]


def test_node_that_left_may_return() -> None:
    (port,) = free_ports(1)
    with Master(hello(0, nnodes=3), port) as master:
        dial(port, message_to_frame(hello(1, nnodes=3))).close()
        master.admit()
        with dial(port, message_to_frame(hello(1, nnodes=3, host="x"))):
            master.admit()
            assert [node.host for node in master.nodes] == ["h0", "x"]
