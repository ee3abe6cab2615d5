"""After d, --detach or a closed terminal a head goes on in the background until the job is over."""

import json
import os
import re
import signal
from pathlib import Path

from tests.launching import PATIENCE, Command, Head
from tests.node.running import wait_until

# Counts until a file says stop, then writes an output and its total.
COUNT = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1] + "/stop"):
    number += 1
    print(f"line {number}", flush=True)
    time.sleep(0.01)
with open(os.environ["ORCHESTRATOR_EXPERIMENT"] + f"/outputs/of_{os.environ['RANK']}", "w") as file:
    file.write("result")
print("TOTAL", number, flush=True)
"""


def background(command: Command) -> int:
    """The process that a command has left behind; it has no terminal and no session of ours."""
    (pid,) = re.findall(r"process (\d+) keeps", command.text)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[4] == "0", "a controlling terminal"
    return int(pid)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def lines_of(node: int, *commands: Command) -> list[str]:
    """Return the lines of a node's rank that the commands have shown, in order."""
    start = f"node{node} rank{node} | "
    shown = [line for command in commands for line in command.lines]
    return [line.removeprefix(start) for line in shown if line.startswith(start)]


def in_file(head: Head, node: int) -> list[str]:
    lines = head.log(node).decode().splitlines()
    return [line for line in lines if line.startswith(("line ", "TOTAL "))]


def complete(head: Head, node: int) -> bool:
    *lines, total = in_file(head, node)
    return lines == [f"line {i + 1}" for i in range(len(lines))] and total == f"TOTAL {len(lines)}"


def test_detached_job_continues_and_attach_takes_over(head: Head) -> None:
    script, secret = head.script("count.py", COUNT), "only-the-command-knows"
    notify = f"cat >> {head.directory / 'told'}; : {secret}"
    words = ["--no-torchrun", "--detach", "--notify", notify, script, str(head.directory)]
    launch = head.run(*words)
    assert head.record["state"] == "running"
    first = background(launch)
    for node in (0, 1):
        wait_until(lambda node=node: len(in_file(head, node)) > 20, "its log grows", PATIENCE)
    status = head.command("orchestrator", "status", "--json").ends()
    assert json.loads(status.text)["state"] == "running"
    attached = head.command("orchestrator", "attach")
    attached.wait_for(r"node1 rank1 \| line 50$")
    wait_until(lambda: gone(first), "the head that was left behind leaves", PATIENCE)
    # A closed terminal sends this signal.
    attached.interrupt(signal.SIGHUP)
    assert attached.finish() == 0, attached.text
    second = background(attached)
    seen = len(in_file(head, 1))
    wait_until(lambda: len(in_file(head, 1)) > seen, "its log grows", PATIENCE)
    (head.directory / "stop").touch()
    wait_until(lambda: gone(second), "the head ends with its job", PATIENCE)
    record = head.record
    assert (record["state"], record["exit_code"], record["verdict"]) == ("done", 0, None)
    # By a head that another shell left behind.
    told = json.loads((head.directory / "told").read_text())
    assert (told["event"], told["state"]) == ("end", "done")
    ours = [path for path in head.experiment.rglob("*") if path.is_file()]
    ours += [
        head.node_file(node, name) for node in (0, 1) for name in ("spec.json", "events.jsonl")
    ]
    showing = [path.name for path in ours if secret.encode() in path.read_bytes()]
    assert showing == [".notify"]
    again = head.command("orchestrator", "attach").ends()
    for node in (0, 1):
        assert complete(head, node)
        assert (head.experiment / "outputs" / f"of_{node}").read_text() == "result"
        # Each once, none lost; a line may have been cut in two where the first one left.
        assert "".join(lines_of(node, attached, again)) == "".join(in_file(head, node))
    once_more = head.command("orchestrator", "attach").ends()
    assert not lines_of(0, once_more)


def test_ended_background_head_leaves_job_and_stop_ends_it(head: Head) -> None:
    script = head.script("count.py", COUNT)
    words = ["--nnodes", "1", "--no-torchrun", "--detach", script, str(head.directory)]
    launch = head.run(*words)
    first = background(launch)
    wait_until(lambda: len(in_file(head, 0)) > 5, "its log grows", PATIENCE)
    wait_until((head.experiment / "head.txt").read_text, "it says who it is", PATIENCE)
    # A shutdown of this machine sends this signal.
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: gone(first), "it leaves", PATIENCE)
    assert head.record["state"] == "running" and head.left(0)
    attached = head.command("orchestrator", "attach")
    # No earlier command has shown the line.
    attached.wait_for(r"node0 rank0 \| line 1$")
    attached.interrupt(signal.SIGHUP)
    assert attached.finish() == 0
    second = background(attached)
    stop = head.command("orchestrator", "stop", "--now").ends()
    assert stop.text.count("nothing left") == 1
    wait_until(lambda: gone(second), "the head ends with its job", PATIENCE)
    record = head.record
    assert (record["state"], len(record["receipts"])) == ("stopped", 1)
    assert head.nothing_left()
