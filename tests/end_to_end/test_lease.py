"""The job outlives links and heads, but never its purpose: an end on one node is an end on all."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.clusters.netns import NetnsCluster
from tests.launching import PATIENCE, Command, Head

# No collective: only its supervisor can tell a node that another one is gone. Does what a file
# says as soon as it is there: fail (node 1 only), or end well.
WAIT = """
import os, sys, time
place = sys.argv[1]
print("ready", flush=True)
while not os.path.exists(place + "/end"):
    if os.environ["NODE_RANK"] == "1" and os.path.exists(place + "/fail"):
        print("failing now", flush=True)
        raise ValueError("it was told to")
    time.sleep(0.02)
"""


def wait_until(condition: Callable[[], Any], patience: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience, f"not within {patience} s"
        time.sleep(0.1)
    return time.monotonic() - began


def launch(head: Head, *words: str) -> Command:
    script = head.script("wait.py", WAIT)
    command = head.launch("--no-torchrun", *words, script, str(head.directory))
    command.wait_for("ready")
    command.wait_for("ready")
    wait_until(lambda: connected(head), 10)
    return command


def events(head: Head, node: int, kind: str) -> list[dict[str, Any]]:
    lines = head.node_file(node, "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def connected(head: Head) -> bool:
    return any(event["active"] for event in events(head, 1, "lease"))


def killed(command: Command) -> None:
    os.kill(command.process.pid, signal.SIGKILL)
    command.finish()


def test_failure_ends_job_without_head(head: Head) -> None:
    killed(launch(head))
    assert head.left(0) and head.left(1)
    (head.directory / "fail").touch()
    # This must not take as long as the lease.
    wait_until(lambda: not head.left(0) and not head.left(1), 20)
    (ending,) = events(head, 0, "ending")
    assert ending["why"] == "rank 1 on node 1 failed"
    attached = head.command("orchestrator", "attach").ends(1)
    assert (head.record["verdict"]["node"], head.record["verdict"]["rank"]) == (1, 1)
    assert "ValueError: it was told to" in attached.text


def test_killed_supervisor_ends_job_without_head(head: Head) -> None:
    killed(launch(head))
    head.cluster.kill(1, events(head, 1, "started")[0]["supervisor"])
    # This must not take as long as the lease of 60 s.
    wait_until(lambda: not head.left(0), 30)
    (ending,) = events(head, 0, "ending")
    assert ending["lost"] == 1 and "node 1's supervisor has ended" in ending["why"]
    head.command("orchestrator", "attach").ends(1)
    assert head.record["verdict"]["kind"] == "supervisor" and head.record["verdict"]["node"] == 1
    assert not head.left(1), "what it left is ended"


def test_cut_beyond_lease_ends_job_and_shorter_one_does_not(
    lonely: Head,
) -> None:
    killed(launch(lonely, "--node-loss-timeout", "6"))
    assert isinstance(lonely.cluster, NetnsCluster)
    for _ in range(2):  # 7 s of 6 in all, and in the end more than 6 since each of them began
        lonely.cluster.cut(1)
        time.sleep(3.5)
        lonely.cluster.restore(1)
        time.sleep(2.5)
    time.sleep(1)
    assert lonely.left(0) and lonely.left(1)
    assert not events(lonely, 0, "ending") and not events(lonely, 1, "ending")
    cut = time.time()
    lonely.cluster.cut(1)
    wait_until(lambda: not lonely.left(0) and not lonely.left(1), PATIENCE)
    for node in (0, 1):
        (ending,) = events(lonely, node, "ending")
        assert ending["time"] - cut > 3, "its lease has not run out"
        assert ending["lost"] == 1 and "no word between node 1 and node 0" in ending["why"]
    lonely.cluster.restore(1)
    lonely.command("orchestrator", "attach").ends(4)
    assert lonely.record["state"] == "lost" and lonely.record["verdict"]["node"] == 1


# -- heads ------------------------------------------------------------------------------------


# Prints without an end: a byte that two heads wrote would be seen.
LINES = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1] + "/end"):
    number += 1
    print(f"line {number}", flush=True)
    time.sleep(0.002)
"""


def test_attach_steal_takes_over_job(head: Head) -> None:
    script = head.script("lines.py", LINES)
    first = head.launch("--nnodes", "1", "--no-torchrun", script, str(head.directory))
    first.wait_for("node0 rank0 . line 5")
    second = head.command("orchestrator", "attach").ends(2)
    assert re.search(r"is followed by process \d+ on \S+, since 20", second.text), second.text
    assert "attach --steal" in second.text
    heads = [first]
    for _ in range(2):
        heads.append(head.command("orchestrator", "attach", "--steal"))
        heads[-1].wait_for("d leaves it running")
        assert heads[-2].finish() == 130, heads[-2].text
        assert f"process {heads[-1].process.pid} on" in heads[-2].lines[-1]
        assert "has taken over; this head ends, the job continues" in heads[-2].lines[-1]
        heads[-1].wait_for("node0 rank0 . line ")
    (head.directory / "end").touch()
    assert heads[-1].finish() == 0, heads[-1].text
    assert head.log(0) == head.node_file(0, "log").read_bytes()
    assert head.record["state"] == "done"


# -- the supervisors' port ---------------------------------------------------------------------


def test_firewall_between_supervisors_is_reported_and_job_runs(lonely: Head) -> None:
    """The job runs as if there were no lease, and one line says so, and what else it means."""
    cluster = lonely.cluster
    assert isinstance(cluster, NetnsCluster)
    rule = f"ip saddr {cluster.addresses[1]} tcp dport != {{ 22, 29500 }} drop"
    chain = "add chain inet wall in { type filter hook input priority 0 ; }"
    for words in ("add table inet wall", chain, f"add rule inet wall in {rule}"):
        cluster.exec(0, ["nft", words])
    script = lonely.script("wait.py", WAIT)
    words = ["--no-torchrun", "--node-loss-timeout", "2", script, str(lonely.directory)]
    command = lonely.launch(*words)
    refused = r"node 1 .* cannot reach node 0's supervisor \(\w+.* open all TCP ports between"
    command.wait_for_all("node0 .* ready", "node1 .* ready", refused)
    time.sleep(3)
    (lonely.directory / "end").touch()
    assert command.finish() == 0, command.text
    assert [event["active"] for event in events(lonely, 1, "lease")] == [False]
    assert command.text.count("cannot reach node 0's supervisor") == 1
