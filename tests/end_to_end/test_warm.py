"""A job on two nodes leaves them warm, the next one starts from that, and it ends with proof."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.launching import PATIENCE, Head

pytestmark = pytest.mark.cluster

PROGRAM = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), "of", os.environ["JOBS_OWN"], flush=True)
while not os.path.exists("go on"):
    time.sleep(0.01)
"""
# It enters another home, as a container does, which the list knows nothing of.
INSIDE = ("--wrap", "env ORCHESTRATOR_HOME=$HOME/inside")


def warm(head: Head, *words: str) -> tuple[int, str]:
    command = head.command("orchestrator", "nodes", "--warm", *words)
    return command.finish(), command.text


def spent(head: Head, node: int) -> int:
    """The time of a processor, in ticks, that what waits on a node has taken so far."""
    files = [f"/proc/{pid}/stat" for pid in head.cluster.processes(node, "ORCHESTRATOR_ROOM=")]
    text = head.cluster.exec(node, ["sh", "-c", f"cat {' '.join(files)} </dev/null 2>&1; true"])
    fields = [line.rpartition(")")[2].split() for line in text.splitlines() if ")" in line]
    return sum(int(words[11]) + int(words[12]) for words in fields)


def wait_until_ready(head: Head) -> list[dict[str, Any]]:
    """Return the standbys once both are idle; each question is a login on every node."""
    deadline = time.monotonic() + PATIENCE
    while True:
        before = None
        while (now := [spent(head, node) for node in (0, 1)]) != before or 0 in now:
            assert time.monotonic() < deadline, now
            before = now
            time.sleep(0.5)
        nodes = [
            node for node in json.loads(warm(head, "list", "--json")[1])["nodes"] if "wrap" in node
        ]
        if len(nodes) == 2 and all(node["warm"] and node["warm"][0]["ready"] for node in nodes):
            return [node["warm"][0] for node in nodes]
        assert time.monotonic() < deadline, nodes


def test_from_cold_to_warm_and_off(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(head.directory / "home"))
    script = head.script("program.py", PROGRAM)
    cold = head.launch(*INSIDE, "--nproc", "2", "--warm", "--env", "JOBS_OWN=1", script)
    # The job is still running.
    waiting = wait_until_ready(head)
    assert cold.process.poll() is None
    (head.directory / "go on").touch()
    assert cold.finish() == 0 and "warm start" not in cold.text
    assert all(each["memory"] > 0 and each["pid"] > 1 for each in waiting)
    again = head.run(*INSIDE, "--nproc", "2", "--warm", "10m", "--env", "JOBS_OWN=1", script)
    assert "orchestrator: warm start on all nodes" in again.text, again.text
    sums = [sorted(line for line in run.lines if " sum 4.0 of 1" in line) for run in (cold, again)]
    assert len(sums[0]) == 4 and sums[0] == sums[1]
    wait_until_ready(head)
    code, text = warm(head, "list")
    assert code == 0 and text.count(" warm ") == 2 and "min" in text
    code, text = warm(head, "off")
    assert code == 0 and text.count("ended ") == 2
    code, text = warm(head, "off")
    assert code == 0 and "nothing was warm" in text
    assert not any(head.cluster.processes(node, "ORCHESTRATOR_ROOM=") for node in (0, 1))
