"""The logs: every byte once, through cuts, kills and detaching; shown from anywhere."""

import contextlib
import hashlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import BIN, Head
from tests.node.running import wait_until

# Numbered lines at a steady pace until a file says stop; their count is the last line.
COUNT = """
import os, sys, time
stop = os.path.join(sys.argv[1], "stop")
number = 0
while not os.path.exists(stop):
    number += 1
    print(f"line {number} of rank {os.environ['RANK']}", flush=True)
    if "fast" not in sys.argv:
        time.sleep(0.01)
print("TOTAL", number, flush=True)
"""


BAR = re.compile(rb"\d+/20000")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def same_bytes(head: Head, node: int) -> bool:
    return sha(head.log(node)) == sha(head.node_file(node, "log").read_bytes())


def numbered(head: Head, node: int, rank: int) -> bool:
    """Are the lines of a rank complete and in order?"""
    lines = head.log(node).decode().splitlines()
    mine = [line for line in lines if line.endswith(f"of rank {rank}")]
    total = len(mine)
    expected = [f"line {i} of rank {rank}" for i in range(1, total + 1)]
    return mine == expected and f"TOTAL {total}" in lines


def test_short_cut_loses_no_output(lonely: Head) -> None:
    command = lonely.launch(
        "--no-torchrun", lonely.script("count.py", COUNT), str(lonely.directory)
    )
    command.wait_for(r"node1 rank1 \| line 20 ")
    lonely.cluster.cut(1)
    began = time.monotonic()
    command.wait_for(r"node 1 .*no word")
    time.sleep(max(0.0, 12 - (time.monotonic() - began)))
    assert command.process.poll() is None
    before = len(lonely.log(1))
    lonely.cluster.restore(1)
    command.wait_for(r"node 1 .*is back")
    (lonely.directory / "stop").touch()
    assert command.finish() == 0, command.text
    assert len(lonely.log(1)) > before
    for node in (0, 1):
        assert same_bytes(lonely, node) and numbered(lonely, node, node)


def test_attach_continues_after_killed_head(head: Head) -> None:
    directory = str(head.directory)
    command = head.launch("--no-torchrun", head.script("count.py", COUNT), directory)
    command.wait_for(r"node1 rank1 \| line 20 ")
    # A status needs no head, and waits for none that holds the job and stands still.
    os.kill(command.process.pid, signal.SIGSTOP)
    status = head.command("orchestrator", "status", "--json").ends()
    os.kill(command.process.pid, signal.SIGKILL)
    command.finish()
    size = len(head.log(1))
    told = json.loads(status.text)
    assert [node["state"] for node in told["nodes"]] == ["running", "running"]
    assert sorted(told["nodes"][1]["ranks"]) == ["1"]
    attached = head.command("orchestrator", "attach")
    attached.wait_for(r"node1 rank1 \| line")
    second = head.command("orchestrator", "attach").ends(2)
    assert "is followed by process" in second.text
    (head.directory / "stop").touch()
    assert attached.finish() == 0, attached.text
    shown = [line for line in attached.lines if line.startswith("node1 rank1 | line")]
    assert int(shown[0].split()[4]) >= 20, (size, attached.lines[:8])
    assert len(head.log(1)) > size
    for node in (0, 1):
        assert same_bytes(head, node) and numbered(head, node, node)
    assert head.record["state"] == "done" and head.record["exit_code"] == 0
    head.command("orchestrator", "attach").ends()


def test_detached_job_is_visible_from_anywhere(head: Head) -> None:
    directory = str(head.directory)
    began = time.monotonic()
    words = ("--no-torchrun", head.script("count.py", COUNT), directory)
    command = head.run("--detach", *words)
    assert "orchestrator attach count_" in command.text and time.monotonic() - began < 30
    look = head.command("orchestrator", "logs", "-f", "--rank", "1")
    look.wait_for(r"node1 rank1 \| line 5 ")
    assert "rank0" not in look.text
    (head.directory / "stop").touch()
    assert look.finish() == 0
    head.command("orchestrator", "attach", head.experiment.name).ends()
    assert numbered(head, 0, 0) and numbered(head, 1, 1)
    assert head.record["state"] == "done"
    finished = head.command("orchestrator", "logs", "--rank", "1").ends()
    assert finished.lines[0] == "node1 rank1 | line 1 of rank 1"
    total = f"TOTAL {len(finished.lines) - 1}"
    assert finished.lines[-1] == f"node1 rank1 | {total}"
    assert total in head.log(1).decode().splitlines()


def test_key_d_detaches(head: Head) -> None:
    """On a real terminal progress bars move in place, and d detaches. A detached head is not lost,
    even if the loss of the head would end the job.
    """
    bar = (
        "import os, sys, time\n"
        "for i in range(20_000):\n"
        "    sys.stderr.write(f'\\r{i}/20000'); sys.stderr.flush(); time.sleep(0.01)\n"
    )
    terminal, theirs = pty.openpty()
    words = [str(BIN / "master_launch"), "--nodes", str(head.node_list)]
    words += ["--ssh-config", str(head.cluster.ssh_config), "--node-loss-timeout", "2"]
    words += ["--nnodes", "1", "--no-torchrun"]
    words += [head.script("bar.py", bar)]
    process = subprocess.Popen(
        ["setsid", "--ctty", *words], cwd=head.directory, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 40
    while len(set(BAR.findall(seen))) < 10 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536)
    assert len(set(BAR.findall(seen))) >= 10, seen[-2000:]
    assert seen.count(b"\n") < 40, "a bar moves in place"
    os.write(terminal, b"d")
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:
                # The command has left and closed the other side of the terminal.
                break
    assert process.wait(timeout=10) == 0
    os.close(terminal)
    time.sleep(4)
    assert head.record["state"] == "running" and head.left(0)
    head.command("orchestrator", "stop", "--now").ends()


def test_large_output_does_not_grow_head(head: Head) -> None:
    """More from one rank than the head may have; the head's memory is looked at while they come."""
    burst = (
        "import sys\n"
        "line = b'x' * 99 + b'\\n'\n"
        "for _ in range(160):\n"
        "    sys.stdout.buffer.write(line * 10_000)\n"
    )
    script = head.script("burst.py", burst)
    command = head.launch("--nnodes", "1", "--no-torchrun", "--quiet", script)
    peak = 0
    while command.process.poll() is None:
        try:
            text = Path(f"/proc/{command.process.pid}/status").read_text()
        except OSError:
            break
        found = [line for line in text.splitlines() if line.startswith("VmHWM")]
        peak = max([peak, *(int(line.split()[1]) for line in found)])
        time.sleep(0.05)
    assert command.finish() == 0, command.text
    assert peak < 150_000, f"{peak} KiB"
    assert head.log(0).count(b"x" * 99 + b"\n") == 1_600_000
    assert same_bytes(head, 0)


def test_closed_pipe_does_not_end_job(head: Head) -> None:
    words = [str(BIN / "master_launch"), "--nodes", str(head.node_list), "--nnodes", "1"]
    words += [
        "--no-torchrun",
        "--ssh-config",
        str(head.cluster.ssh_config),
        head.script("count.py", COUNT),
    ]
    words += [str(head.directory)]
    process = subprocess.Popen(words, cwd=head.directory, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    logs = head.directory / "experiments"
    wait_until(lambda: any(x.stat().st_size > 2000 for x in logs.glob("*/logs/node_0_*.txt")))
    assert process.poll() is None
    (head.directory / "stop").touch()
    assert process.wait(timeout=40) == 0
    assert numbered(head, 0, 0)


@pytest.fixture
def small(head: Head) -> Iterator[Path]:
    path = head.directory / "small disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_on_head_delays_logs(head: Head, small: Path) -> None:
    """The job goes on, and every byte comes home once there is room again."""
    burst = "print('y' * 99)\n"
    text = f"for _ in range(30_000):\n    {burst}"
    words = ["--nnodes", "1", "--no-torchrun", "--quiet", "--experiments", str(small)]
    command = head.launch(*words, head.script("burst.py", text))
    command.wait_for("no space left")
    assert command.process.poll() is None
    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
    assert command.finish() == 0, command.text
    for log in small.glob("*/logs/node_*.txt"):
        assert log.read_bytes().count(b"y" * 99 + b"\n") == 30_000
    assert json.loads(next(small.glob("*/job.json")).read_text())["state"] == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_on_head_prevents_start(head: Head, small: Path) -> None:
    with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    words = ["--experiments", str(small), head.script("x.py", "print('never')")]
    command = head.launch(*words).ends(3)
    assert "nothing was started" in command.text and "0 B free of" in command.text
    command = head.launch("--check", "none", *words).ends(2)
    assert "cannot be written: No space left on device; nothing was started" in command.text
    assert [path.name for path in small.iterdir()] == ["filler"]
    assert head.nothing_left()
