"""Everyday commands on all nodes at once, as they are typed."""

import json
import re
import signal
import subprocess

import pytest

from orchestrator.head.nodes.node_list import read_nodes
from tests.launching import BIN, PATIENCE, Head


def test_exec_runs_on_all_nodes(head: Head) -> None:
    here = str(head.directory)
    command = head.command(
        "orchestrator", "exec", "--", "printf", "%s|", "a b", "$HOME", "it's"
    ).ends()
    assert sorted(command.lines) == [f"node{i} | a b|$HOME|it's|" for i in (0, 1)]
    text = r"printf '\033[2J\351\n\001'; pwd; echo no >&2; test -e odd && exit 7"
    (head.directory / "odd").touch()
    command = head.command("orchestrator", "exec", "--workdir", here, text).ends(1)
    assert {"node0 | \N{REPLACEMENT CHARACTER}", f"node1 | ␁{here}", "node0 | no"} <= {
        *command.lines
    }
    assert re.search(r"nodes 0-1 +\S+, \S+ +7$", command.text, re.M) and "EXIT CODE" in command.text
    command = head.command("orchestrator", "exec", "--fold", "--", "uname", "-s").ends()
    first, second = (node.name for node in read_nodes(head.node_list))
    assert command.lines == [f"--- nodes 0-1 ({first}, {second})", "Linux"]


def test_exec_json_has_output_of_every_node(head: Head) -> None:
    shared = ["--nodes", str(head.node_list), "--ssh-config", str(head.cluster.ssh_config)]
    text = "cat; echo out; echo e >&2; kill -9 $$"
    done = subprocess.run(
        [str(BIN / "orchestrator"), "exec", *shared, "--json", "--", "sh", "-c", text],
        input=b"read by no node",
        capture_output=True,
        check=False,
        cwd=head.directory,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    nodes = json.loads(done.stdout)["nodes"]
    assert [node["name"] for node in nodes] == head.cluster.addresses
    for node in nodes:
        assert (node["code"], node["stdout"], node["stderr"]) == (137, "out\n", "e\n")


def test_exec_and_top_report_node_that_is_down(head: Head) -> None:
    head.cluster.kill_sshd(1)
    try:
        command = head.command("orchestrator", "exec", "--", "echo", "here").ends(4)
        top = head.command("orchestrator", "top", "--once").ends(4)
    finally:
        head.cluster.start_sshd(1)
    assert "node0 | here" in command.lines
    assert "refuses connections" in command.text and "is sshd running there" in command.text
    assert "refuses connections" in top.text and "no job is seen; 1 node" in top.text


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9", "time-out"])
def test_exec_ends_what_it_started(head: Head, how: str) -> None:
    """The lock is held while the program or a child that ignores SIGTERM lives."""
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
        assert re.search(r"nodes 0-1 +\S+, \S+ +124 +ended after its time-out", command.text)
    subprocess.run(["flock", lock, "true"], timeout=PATIENCE, check=True)


def test_running_job_is_shown_and_ssh_opens_shell(head: Head) -> None:
    text = "print('ready', flush=True); import time; time.sleep(600)"
    launch = head.launch("--nnodes", "1", "--no-torchrun", head.script("waits.py", text))
    launch.wait_for("node0 rank0 [|] ready")
    shell = head.command("orchestrator", "ssh", "0", "pwd; exit 5")
    assert (shell.finish(), shell.lines[-1]) == (5, str(head.directory))
    is_seen_among_all_nodes(head)
    launch.interrupt()
    assert launch.finish() == 130


def test_push_sends_files_to_all_nodes(head: Head) -> None:
    (head.directory / "set").mkdir()
    (head.directory / "set" / "a").write_bytes(b"x" * 1000)
    copy = f"{head.directory}/copy"
    # The hosts of this test share the directory.
    only = ["--node", "1"]
    command = head.command("orchestrator", "push", "set", copy, *only, "--json").ends()
    (node,) = json.loads(command.text)["nodes"]
    assert (node["node"], node["sent"], node["bytes"]) == (1, ["a"], 1000)
    assert (head.directory / "copy/a").read_bytes() == b"x" * 1000
    again = head.command("orchestrator", "push", "set", copy).ends()
    assert again.text.count("0 B") == 2
    wrong = head.command("orchestrator", "push", "nothing", copy).ends(2)
    assert "no such file" in wrong.text


def is_seen_among_all_nodes(head: Head) -> None:
    """A job that runs on the first of two."""
    command = head.command("orchestrator", "top", "--json").ends()
    seen = json.loads(command.text)
    assert [node["name"] for node in seen["nodes"]] == head.cluster.addresses
    assert all(node["load"]["cpus"] >= 1 for node in seen["nodes"])
    (running,) = seen["jobs"]
    assert running["experiment"] == head.experiment.name
    assert running["nodes"] == head.cluster.addresses[:1]
