"""Everyday commands on all nodes at once, as they are typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.launching import BIN, PATIENCE, Head


def test_a_command_on_all_nodes(head: Head) -> None:
    here = str(head.directory)
    command = head.command("orchestrator", "exec", "--", "printf", "%s|", "a b", "$HOME", "it's")
    assert command.finish() == 0
    assert sorted(command.lines) == [f"node{i} | a b|$HOME|it's|" for i in (0, 1)]
    text = r"printf '\033[2J\351\n\001'; pwd; echo no >&2; test -e odd && exit 7"
    (head.directory / "odd").touch()
    command = head.command("orchestrator", "exec", "--workdir", here, text)
    assert command.finish() == 1
    assert {"node0 | \N{REPLACEMENT CHARACTER}", f"node1 | ␁{here}", "node0 | no"} <= {
        *command.lines
    }
    assert command.text.count("  7") == 2 and "EXIT CODE" in command.text
    command = head.command("orchestrator", "exec", "--fold", "--", "uname", "-s")
    assert command.finish() == 0
    assert command.lines == ["--- nodes 0-1 (2 nodes)", "Linux"]


def test_json_has_all_of_it(head: Head) -> None:
    script = head.script("typed", "read line; echo $line; echo e >&2; kill -9 $$")
    shared = ["--nodes", str(head.node_list), "--ssh-config", str(head.cluster.ssh_config)]
    with (head.directory / script).open("rb") as file:
        done = subprocess.run(
            [str(BIN / "orchestrator"), "exec", *shared, "--json", "--", "sh", "-s"],
            stdin=file,
            capture_output=True,
            check=False,
            cwd=head.directory,
        )
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0  # the loop around it reads on
    assert (done.returncode, done.stderr) == (1, b"")
    nodes = json.loads(done.stdout)["nodes"]
    assert [node["name"] for node in nodes] == head.cluster.addresses
    for node in nodes:
        assert (node["code"], node["stdout"], node["stderr"]) == (137, "\n", "e\n")


def test_one_that_is_down_is_a_row_and_the_others_run(head: Head) -> None:
    head.cluster.kill_sshd(1)
    try:
        command = head.command("orchestrator", "exec", "--", "echo", "here")
        assert command.finish() == 4
    finally:
        head.cluster.start_sshd(1)
    assert "node0 | here" in command.lines
    assert "refuses connections" in command.text and "is sshd running there" in command.text


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9", "time-out"])
def test_what_it_started_ends_with_it(head: Head, how: str) -> None:
    """Whoever holds the lock lives: the program, and a child that does not listen to SIGTERM."""
    lock = head.directory / "lock"
    child = "trap '' TERM; sleep 600 & echo up; wait; sleep 600"
    limit = ["--timeout", "0.5"] if how == "time-out" else []
    words = ["--", "flock", "--shared", str(lock), "sh", "-c", child]
    command = head.command("orchestrator", "exec", *limit, *words)
    if how != "time-out":
        command.wait_for_all("node0 [|] up", "node1 [|] up")
        command.interrupt(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
    assert command.finish() == {"Ctrl-C": 130, "kill -9": -9, "time-out": 1}[how]
    if how == "time-out":
        assert command.text.count("ended after its time-out") == 2
    subprocess.run(["flock", lock, "true"], timeout=PATIENCE, check=True)
