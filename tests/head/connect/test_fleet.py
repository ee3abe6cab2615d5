from __future__ import annotations

from orchestrator.common.errors import NodeError, NoKey
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


def test_without_any_key_it_is_made_once_and_copied_to_each_node() -> None:
    failed = [
        (Node(name), NoKey("there is no key to log in with", f"ssh-copy-id -p 22 bob@{name}"))
        for name in ("gpu1", "gpu2")
    ]
    lines = failure_table(failed, 2, "").splitlines()
    assert [line.split()[-1] for line in lines if "ssh-copy-id" in line] == ["bob@gpu1", "bob@gpu2"]
    assert [line for line in lines if "ssh-keygen" in line] == [
        "  first, once: ssh-keygen -t ed25519; then for each node the line below it"
    ]
