"""A job leaves its node warm, the next one starts from that, and it ends with proof."""

import json
import time
from typing import Any

import pytest

from tests.launching import PATIENCE, Head

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
INSIDE = ("--nnodes", "1", "--nproc", "2", "--wrap", "env ORCHESTRATOR_HOME=$HOME/inside")


def warm(head: Head, *words: str) -> tuple[int, str]:
    command = head.command("orchestrator", "nodes", "--warm", *words)
    return command.finish(), command.text


def spent(head: Head) -> int:
    """The time of a processor, in ticks, that what waits on the node has taken so far."""
    files = [f"/proc/{pid}/stat" for pid in head.cluster.processes(0, "ORCHESTRATOR_ROOM=")]
    text = head.cluster.exec(0, ["sh", "-c", f"cat {' '.join(files)} </dev/null 2>&1; true"])
    fields = [line.rpartition(")")[2].split() for line in text.splitlines() if ")" in line]
    return sum(int(words[11]) + int(words[12]) for words in fields)


def wait_until_ready(head: Head) -> dict[str, Any]:
    """Return the standby once it is idle; each question is a login on every node."""
    deadline = time.monotonic() + PATIENCE
    while True:
        before = None
        while (now := spent(head)) != before or not now:
            assert time.monotonic() < deadline, now
            before = now
            time.sleep(0.5)
        nodes = json.loads(warm(head, "list", "--json")[1])["nodes"]
        found: list[dict[str, Any]] = [
            each for node in nodes if "wrap" in node for each in node["warm"] if each["ready"]
        ]
        if found:
            return found[0]
        assert time.monotonic() < deadline, nodes


def test_warm_start_from_cold_to_off(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(head.directory / "home"))
    script = head.script("program.py", PROGRAM)
    cold = head.launch(*INSIDE, "--warm", "--env", "JOBS_OWN=1", script)
    # The job is still running.
    waiting = wait_until_ready(head)
    assert cold.process.poll() is None
    (head.directory / "go on").touch()
    assert cold.finish() == 0 and "warm start" not in cold.text
    assert waiting["memory"] > 0 and waiting["pid"] > 1
    again = head.run(*INSIDE, "--warm", "10m", "--env", "JOBS_OWN=1", script)
    assert "orchestrator: warm start on all nodes" in again.text, again.text
    sums = [sorted(line for line in run.lines if " sum 2.0 of 1" in line) for run in (cold, again)]
    assert len(sums[0]) == 2 and sums[0] == sums[1]
    wait_until_ready(head)
    code, text = warm(head, "list")
    assert code == 0 and text.count(" warm ") == 1 and "min" in text
    code, text = warm(head, "off")
    assert code == 0 and text.count("ended ") == 1
    code, text = warm(head, "off")
    assert code == 0 and "nothing was warm" in text
    assert not any(head.cluster.processes(node, "ORCHESTRATOR_ROOM=") for node in (0, 1))
