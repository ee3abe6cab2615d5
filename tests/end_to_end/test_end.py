"""How jobs end: by themselves, by a failure, by the user. Nothing is left behind in any case."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from orchestrator.config.schema import Config
from tests.conftest import Cluster
from tests.launching import PATIENCE, Head
from tests.node.running import wait_until

# Rank 3 fails; the others wait for it in a collective.
FAIL = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 3:
    print(f"TIME {time.time()}", flush=True)
    def deeper():
        raise ValueError("two lines\\nof words")
    deeper()
dist.all_reduce(torch.ones(1))
"""
# Rank 1 fails once both are here; the other saves for 3 s when it is asked to end.
EMERGENCY = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    time.sleep(3)
    print("saved", rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
open("here" + rank, "w").close()
while not (os.path.exists("here0") and os.path.exists("here1")):
    time.sleep(0.01)
if rank == "1":
    raise ValueError("of rank 1")
time.sleep(1000)
"""
# No other process on this machine sleeps for this number of seconds.
LONG = str(10**6 + os.getpid())
# Saves when asked to, and starts a child that leaves its session and its environment.
SAVE = f"""
import os, signal, subprocess, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save if sys.argv[1] == "polite" else signal.SIG_IGN)
subprocess.Popen(["env", "-i", "setsid", "sleep", "{LONG}"])
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def sleepers(cluster: Cluster) -> int:
    """Scrubbed children that live on any host."""
    found = 0
    for node in range(len(cluster.addresses)):
        look = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
        found += cluster.exec(node, ["sh", "-c", look]).count(f"sleep {LONG}")
    return found


def test_failing_rank_ends_job_everywhere(head: Head) -> None:
    command = head.launch("--nproc", "2", head.script("fail.py", FAIL)).ends(1)
    # From the file: what a busy machine has not shown by then, a failure leaves out of the screen.
    (began,) = [line[5:] for line in head.log(1).decode().splitlines() if line.startswith("TIME ")]
    took = head.record["ended"] - float(began)
    assert took < Config().launch.grace, "as if it had been asked nicely"
    verdict = head.record["verdict"]
    assert (verdict["node"], verdict["rank"]) == (1, 3)
    assert "ValueError: two lines" in verdict["message"]
    (cause,) = (line for line in command.lines if "the cause: " in line)
    assert "rank 3 on node 1" in cause
    assert head.record["nodes"][1]["ranks"]["3"]["code"] == 1
    # Once, if the screen had shown it all before the job was ended; else a second time.
    lines = ["node1 rank3 | ValueError: two lines", "node1 rank3 | of words"]
    # torch begins each with its rank, where the screen has shown them
    assert set(lines) < {line.replace("| [rank3]: ", "| ") for line in command.lines}
    assert "fail.py:" in verdict["where"] and "in deeper" in verdict["where"]
    assert "rank.py" not in verdict["traceback"] and "runpy" not in verdict["traceback"]
    assert head.nothing_left()


def test_other_ranks_save_after_failure(head: Head) -> None:
    head.launch("--no-torchrun", head.script("emergency.py", EMERGENCY)).ends(1)
    assert b"saved 0" in head.log(0) and head.record["verdict"]["rank"] == 1
    assert head.nothing_left()


def test_second_ctrl_c_kills(head: Head) -> None:
    script = head.script("save.py", SAVE)
    command = head.launch("--nnodes", "1", "--no-torchrun", script, "stubborn")
    command.wait_for("ready")
    command.interrupt()
    command.wait_for("Ctrl-C again to kill")
    command.interrupt()
    began = time.monotonic()
    assert command.finish() == 130
    assert time.monotonic() - began < Config().launch.grace
    assert head.nothing_left() and sleepers(head.cluster) == 0


def test_repeated_ctrl_c_leaves_whole_record(head: Head) -> None:
    """Also while the result is written down: the record is whole and nothing is taken back."""
    script = head.script("save.py", SAVE)
    command = head.launch("--nnodes", "1", "--no-torchrun", script, "polite")
    command.wait_for("ready")
    for _ in range(2):
        command.interrupt()
        command.wait_for("Ctrl-C again|stopped after|killing")
    while command.process.poll() is None:
        command.interrupt()
        time.sleep(0.002)
    assert command.finish() == 130, command.text
    # The program's own lines begin with the node.
    ours = [line for line in command.lines if not line.startswith("node")]
    assert "Traceback" not in "\n".join(ours)
    assert (head.record["state"], head.record["exit_code"]) == ("stopped", 130)
    assert head.nothing_left()


def test_failing_torchrun_is_named(head: Head) -> None:
    (head.directory / "broken").mkdir()
    (head.directory / "broken" / "torch.py").write_text("raise ImportError('broken torch')\n")
    hook = head.directory / "hook.sh"
    hook.write_text(f'[ "$NODE_RANK" = 0 ] || export PYTHONPATH={head.directory}/broken\n')
    command = head.launch("--hook", str(hook), head.script("x.py", "")).ends(1)
    assert head.record["verdict"]["node"] == 1
    assert head.record["verdict"]["kind"] == "environment"
    assert re.search(r"^node1 +\| ImportError: broken torch$", command.text, re.MULTILINE)
    assert head.nothing_left()


def test_stop_ends_one_job_and_proves_it(head: Head) -> None:
    script = head.script("save.py", SAVE)
    jobs = [head.launch("--name", "one", "--no-torchrun", script, "polite")]
    jobs += [head.launch("--name", "two", "--nnodes", "1", "--no-torchrun", script, "polite")]
    for job, ranks in zip(jobs, (2, 1), strict=True):
        for _ in range(ranks):
            job.wait_for("ready")
    first = next(e for e in head.experiments if e.name.startswith("one"))
    stop = head.command("orchestrator", "stop", first.name).ends()
    assert stop.text.count("nothing left") == 2
    assert stop.text.count("; port ") == 1
    assert jobs[0].finish() == 130
    receipts = json.loads((first / "job.json").read_text())["receipts"]
    # The keeper, the rank and its child.
    assert [len(receipt["ended"]) for receipt in receipts.values()] == [3, 3]
    assert jobs[1].process.poll() is None
    head.command("emergency_stop").ends()
    assert jobs[1].finish() == 130
    assert head.nothing_left() and sleepers(head.cluster) == 0
    again = head.command("emergency_stop").ends()
    assert "no job runs" in again.text


SLOW = """#!/bin/bash
case " $* " in *" supervise "*) touch {reached}; read < {go};; esac
exec -a "$0" {python} "$@"
"""


def slow_python(directory: Path, reached: Path) -> Path:
    """Return an environment like this one whose Python never starts a supervisor."""
    go, python = directory / "go", directory / "slow" / "bin" / "python"
    os.mkfifo(go)
    python.parent.mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib"):
        (directory / "slow" / name).symlink_to(Path(sys.prefix, name))
    paths = {"reached": reached, "go": go, "python": sys.executable}
    python.write_text(SLOW.format(**{k: shlex.quote(str(path)) for k, path in paths.items()}))
    python.chmod(0o755)
    return python


def test_stop_during_start_ends_every_part(head: Head) -> None:
    """One node has started, the other has not got so far; both are proved, and the launch ends."""
    reached = head.directory / "reached"
    python = slow_python(head.directory, reached)
    first, second = head.node_list.read_text().splitlines()
    (head.directory / "slow_nodes").write_text(f"{first}\n{second} python={python}\n")
    script = head.script("save.py", SAVE)
    command = head.launch(*("--nodes", "slow_nodes", "--no-torchrun", "--detach", script, "polite"))
    wait_until(reached.exists, "the start", PATIENCE)
    stop = head.command("orchestrator", "stop", "--now").ends()
    assert stop.text.count("nothing left") == 2
    assert command.finish() == 130, command.text
    assert "was stopped before it had started" in command.text
    assert (head.record["state"], head.record["exit_code"]) == ("stopped", 130)
    assert head.nothing_left() and sleepers(head.cluster) == 0
    again = head.command("orchestrator", "stop").ends()
    assert "has ended already (stopped)" in again.text


def test_node_lost_for_good_ends_job(lonely: Head) -> None:
    script = lonely.script("save.py", SAVE)
    command = lonely.launch("--no-torchrun", "--node-loss-timeout", "3", script, "polite")
    command.wait_for("ready")
    command.wait_for("ready")
    lonely.cluster.cut(1)
    command.wait_for("node 1 .*no word")
    assert command.finish() == 4
    assert lonely.record["state"] == "lost" and lonely.record["verdict"]["node"] == 1
    assert not lonely.left(0)
    lonely.cluster.restore(1)
    lonely.command("orchestrator", "emergency-stop").ends()
    assert lonely.nothing_left()


def test_closed_terminal_leaves_job(head: Head) -> None:
    """Also while the job is just being started: it has a head, which goes on in the background."""
    script = head.script("save.py", SAVE)
    command = head.launch("--nnodes", "1", "--no-torchrun", script, "polite")
    command.wait_for("logs in")
    command.interrupt(signal.SIGHUP)
    assert command.finish() == 0
    assert "keeps recording its logs" in command.text and "attach" in command.text
    assert head.record["state"] == "running" and head.left(0)
    head.command("orchestrator", "stop", "--now").ends()
    assert head.record["state"] == "stopped"
    assert head.nothing_left()
