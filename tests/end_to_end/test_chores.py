"""Everyday commands on all nodes at once, as they are typed."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from orchestrator.head.nodes.node_list import read_nodes
from tests.launching import BIN, PATIENCE, Head

pytestmark = pytest.mark.cluster


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
    assert re.search(r"nodes 0-1 +\S+, \S+ +7$", command.text, re.M) and "EXIT CODE" in command.text
    command = head.command("orchestrator", "exec", "--fold", "--", "uname", "-s")
    assert command.finish() == 0
    first, second = (node.name for node in read_nodes(head.node_list))
    assert command.lines == [f"--- nodes 0-1 ({first}, {second})", "Linux"]


def test_json_has_all_of_it(head: Head) -> None:
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
        assert re.search(r"nodes 0-1 +\S+, \S+ +124 +ended after its time-out", command.text)
    subprocess.run(["flock", lock, "true"], timeout=PATIENCE, check=True)


ENVIRONMENT = """
import json, os, time
with open(f"env.{os.environ['RANK']}", "w") as file:
    json.dump(dict(os.environ), file)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_job_that_runs_is_seen_and_a_shell_has_its_environment(head: Head) -> None:
    head.script("activate", "export ACTIVE='by a script'")
    launch = head.launch(
        *("--nnodes", "1", "--no-torchrun", "--activate", f"script:{head.directory}/activate"),
        *("--env", 'WORD=it\'s "set"', "--env", "TOKEN"),
        head.script("waits.py", ENVIRONMENT),
        TOKEN="a secret",
    )
    launch.wait_for("node0 rank0 [|] ready")
    code = "import json, os; print(json.dumps(dict(os.environ)), os.getcwd())"
    command = head.command("orchestrator", "ssh", "0", "--", "python", "-c", code)
    assert command.finish() == 0, command.text
    shown, _, directory = command.text.rpartition("} ")
    shell = json.loads(shown + "}")
    assert directory == str(head.directory)
    assert (shell["WORD"], shell["TOKEN"]) == ('it\'s "set"', "a secret")
    assert shell["ACTIVE"] == "by a script"
    rank = json.loads((head.directory / "env.0").read_text())
    of_torchrun = re.compile(
        "SSH_|TORCH|LOCAL_|GROUP_|ROLE_|RANK$|WORLD_SIZE$|MASTER_|ORCHESTRATOR_RUN$"
    )
    of_shells = {"_", "SHLVL", "OLDPWD"}
    kept = {name for name in rank if not of_torchrun.match(name)} - of_shells
    assert {name: shell.get(name) for name in kept} == {name: rank[name] for name in kept}
    plain = head.command("orchestrator", "ssh", "--no-job", "0", 'echo "$WORD|"; exit 5')
    assert (plain.finish(), plain.lines[-1]) == (5, "|")
    is_seen_among_all_nodes(head)
    launch.interrupt()
    assert launch.finish() == 130
    assert "ORCHESTRATOR_RUN" not in shell  # a stop of the job does not end the shell
    over = head.command("orchestrator", "ssh", "0", 'echo "$WORD|"')
    assert (over.finish(), over.lines[-1]) == (0, "|")
    named = head.command("orchestrator", "ssh", "--job", head.experiment.name, "0", 'echo "$WORD|"')
    assert (named.finish(), named.lines[-1]) == (0, 'it\'s "set"|')
    nobody = head.command("orchestrator", "ssh", "--job", "nothing", "0", "true")
    assert nobody.finish() == 2 and "no experiment 'nothing'" in nobody.text


def test_files_to_all_nodes(head: Head) -> None:
    (head.directory / "set").mkdir()
    (head.directory / "set" / "a").write_bytes(b"x" * 1000)
    copy = f"{head.directory}/copy"
    only = ["--node", "1"]  # the hosts of this test share the directory
    command = head.command("orchestrator", "push", "set", copy, *only, "--json")
    assert command.finish() == 0, command.text
    (node,) = json.loads(command.text)["nodes"]
    assert (node["node"], node["sent"], node["bytes"]) == (1, ["a"], 1000)
    assert (head.directory / "copy/a").read_bytes() == b"x" * 1000
    again = head.command("orchestrator", "push", "set", copy)
    assert again.finish() == 0 and again.text.count("0 B") == 2, again.text
    wrong = head.command("orchestrator", "push", "nothing", copy)
    assert wrong.finish() == 2 and "no such file" in wrong.text


def is_seen_among_all_nodes(head: Head) -> None:
    """A job that runs on the first of two."""
    command = head.command("orchestrator", "top", "--json")
    assert command.finish() == 0
    seen = json.loads(command.text)
    assert [node["name"] for node in seen["nodes"]] == head.cluster.addresses
    assert all(node["load"]["cpus"] >= 1 for node in seen["nodes"])
    (running,) = seen["jobs"]
    assert running["experiment"] == head.experiment.name
    assert running["nodes"] == head.cluster.addresses[:1]


def test_all_nodes_at_a_look_and_one_that_is_down(head: Head) -> None:
    head.cluster.kill_sshd(1)
    try:
        command = head.command("orchestrator", "top", "--once")
        assert command.finish() == 4
    finally:
        head.cluster.start_sshd(1)
    assert "refuses connections" in command.text and "no job runs there" in command.text
