"""Failures planted for real: the verdict names each, where it was, and what to do.

Rank 1 fails; rank 0 sits in a collective with it and fails because of that. Both are on one node,
but where it matters which of two nodes is heard of first, or tells the time otherwise.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clusters.netns import NetnsCluster
from tests.launching import Command, Head

BEGIN = """
import datetime, os, sys
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
def join(seconds=60):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    dist.barrier()
"""


class Planted(NamedTuple):
    # The line with HERE in it is the one to be named.
    text: str
    kind: str
    # The message matches this pattern.
    words: str
    # The fix matches this pattern.
    fix: str
    nodes: int = 1
    # It is True if the same rank fails each time.
    named: bool = True


TABLE = {
    "in a DataLoader worker": Planted(
        """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        return torch.ones(3)[i + 5]  # HERE
join()
if rank == 1:
    list(torch.utils.data.DataLoader(Rows(), num_workers=1))
dist.all_reduce(torch.ones(1))
""",
        "exception", r"^IndexError: index 5 .*\(in DataLoader worker process 0\)", r"fix \S+:\d+$",
    ),
    "one rank never joins": Planted(
        "if rank == 1: sys.exit(0)\njoin(2)",
        "ended_early", "^ended with exit code 0 while others waited", "same number of steps",
    ),
    "no such interface": Planted(
        "if rank == 1: os.environ['GLOO_SOCKET_IFNAME'] = 'ib7'\njoin(2)",
        "communication", "ib7", "ifname=",
    ),
    "a rank that is late for a collective": Planted(
        "join(2)\nif rank == 1:\n    import time; time.sleep(30)\ndist.all_reduce(torch.ones(1))",
        "hang", r"did not come .* in time; it is in \S+/train\.py:10 .*rank 0 on", "as long", 2,
    ),
    "a rank that is late for a barrier": Planted(
        """
join(30)
if rank == 1:
    import time; time.sleep(30)
dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
""",
        "hang", r"did not come .* in time; it is in \S+/train\.py:11 .*rank 0 on", "as long", 2,
    ),
    "an address that only the node itself has": Planted(
        "os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\njoin(2)",
        "communication", "connectFullMesh", "ifname=", 2, False,
    ),
    "a port that is taken": Planted(
        """
import socket
join()
if rank == 1:
    held = socket.create_server(('', 0))
    dist.TCPStore('127.0.0.1', held.getsockname()[1], 1, True, use_libuv=False)  # HERE
dist.all_reduce(torch.ones(1))
""",
        "communication", "(?i)address already in use", "ss -ltnp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", TABLE.values(), ids=TABLE)
def test_verdict_names_planted_cause(head: Head, planted: Planted) -> None:
    script = head.script("train.py", BEGIN + planted.text)
    ranks = ("--nnodes", str(planted.nodes), "--nproc", str(2 // planted.nodes))
    command = head.launch(*ranks, script).ends(1)
    verdict = head.record["verdict"]
    assert verdict["kind"] == planted.kind, verdict
    assert re.search(planted.words, verdict["message"].splitlines()[0]), verdict
    assert re.search(planted.fix, verdict["fix"]), verdict
    if planted.named:
        assert (verdict["node"], verdict["rank"]) == (planted.nodes - 1, 1), verdict
    lines = (head.directory / "train.py").read_text().splitlines()
    here = [number for number, line in enumerate(lines, 1) if "# HERE" in line]
    if here:
        assert re.search(rf"/train\.py:{here[0]}( in |$)", verdict["where"]), verdict
    assert_it_ends_with_the_verdict(command, verdict)
    assert head.nothing_left()


def assert_it_ends_with_the_verdict(command: Command, verdict: dict[str, Any]) -> None:
    """Class, place, line, what to do: the last lines on the screen, in this order."""
    (start,) = (n for n, line in enumerate(command.lines) if "the cause: " in line)
    end = command.lines[start:]
    who = f"rank {verdict['rank']} on node {verdict['node']} ({verdict['node_name']}), "
    # The verdict needs no title then.
    says_all = verdict["message"].startswith("ended with exit code")
    says_all = says_all or verdict["kind"] == "exception"
    assert who in end[0] and (says_all or verdict["title"] in end[0])
    assert end[0].endswith(verdict["message"].splitlines()[0])
    assert not verdict["where"] or end[1] == f"  at {verdict['where']}"
    assert end[-1] == f"orchestrator: what to do: {verdict['fix']}"


# -- several ranks ----------------------------------------------------------------------------


SKEWED = """
import runpy, sys, time
true = time.time
time.time = lambda: true() + {shift}
sys.executable = {wrapper!r}
words = sys.argv[1:]
while words[0] not in ("-c", "-m") and words[0].startswith("-"):
    words.pop(0)
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    exec(words[1], {{"__name__": "__main__"}})
elif words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    sys.path[0] = words[0].rpartition("/")[0]
    runpy.run_path(words[0], run_name="__main__")
"""


def test_skewed_clock_does_not_change_cause(head: Head) -> None:
    """Node 1 lives in another hour. One rank fails 0.2 s before the other, and is heard of last."""
    wrapper, python = head.directory / "python", head.directory / "skewed.py"
    python.write_text(SKEWED.format(shift=3600, wrapper=str(wrapper)))
    words = shlex.join([sys.executable, str(python)])
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    zero, one = head.cluster.addresses
    head.node_list = head.cluster.write_list([zero, f"{one} python={wrapper}"])
    text = """
import atexit, os, time
if os.environ["RANK"] == "1":
    open("failed", "w").close()
    atexit.register(time.sleep, 0.5)
    raise ValueError("first")
while not os.path.exists("failed"): time.sleep(0.001)
time.sleep(0.2)
raise ValueError("second")
"""
    command = head.launch("--no-torchrun", head.script("train.py", text)).ends(1)
    verdict = head.record["verdict"]
    assert (verdict["rank"], verdict["message"]) == (1, "ValueError: first")
    assert [told["message"] for told in verdict["also"]] == ["ValueError: second"]
    assert abs(head.record["ended"] - verdict["time"]) < 30, "by the head's own clock"
    assert "the clock of node 1 is 3600 s ahead" in command.text


# -- a machine that lacks something -------------------------------------------------------------

GREEDY = """
import os, time
print(f"PID {os.getpid()}", flush=True)
while not os.path.exists("go"): time.sleep(0.005)
rows = bytearray(2**28)
"""


@contextlib.contextmanager
def control_group() -> Iterator[Path | None]:
    """Yield a control group limited to 32 MB, or None without the right to make one."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    path = root / ("memory" if old else ".") / f"orchestrator-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(2**25))
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        yield None
    else:
        try:
            yield path
        finally:
            path.rmdir()


def pid_here(head: Head, node: int, pid: int) -> int:
    cluster = head.cluster
    return cluster._numbers_outside(node)[pid] if isinstance(cluster, NetnsCluster) else pid


def is_out_of_memory(head: Head, command: Command) -> None:
    assert command.finish() == 1, command.text
    verdict = head.record["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("out_of_memory", 0), verdict
    assert "killed by signal 9 (SIGKILL): the kernel's out-of-memory killer" in verdict["message"]
    assert "limits of its container" in verdict["fix"]
    assert head.nothing_left()


def test_kernel_oom_kill_is_named(head: Head) -> None:
    with control_group() as group:
        if group is None:
            # The next test covers this with a counter of our own.
            return
        script = head.script("greedy.py", GREEDY)
        command = head.launch("--nnodes", "1", "--no-torchrun", script)
        pid = int(command.wait_for(r"PID (\d+)")[1])
        (group / "cgroup.procs").write_text(str(pid_here(head, 0, pid)))
        head.script("go", "")
        is_out_of_memory(head, command)


def test_full_home_is_named(netns_cluster: Callable[..., NetnsCluster], tmp_path: Path) -> None:
    home = Path.home()
    cluster = netns_cluster(1, tmpfs=[home], tmpfs_size="16m")
    head = Head(cluster, tmp_path)
    text = f"""
import contextlib
with open("{home}/weights", "wb", buffering=0) as file:
    for size in (2**20, 2**12, 1):
        with contextlib.suppress(OSError):
            while file.write(bytes(size)): pass
    file.write(b"0")
"""
    script = head.script("train.py", text)
    # A disk of 16 MiB is too small for the check before the start.
    anyway = ("--check", "none", "--no-torchrun", script)
    head.launch(*anyway).ends(1)
    verdict = head.record["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("disk_full", 0), verdict
    assert verdict["message"] == "OSError: [Errno 28] No space left on device"
    assert "train.py:" in verdict["where"]
    assert head.nothing_left()
    # The job itself had written files there.
    cluster.fill_disk(0, home)
    refused = head.launch(*anyway[2:]).ends(3)
    assert re.search(rf"^BAD   disk: \S+: {home}: 0 B free", refused.text, re.M), refused.text
    again = head.launch(*anyway).ends(4)
    assert f"{home}/.orchestrator/runs/" in again.text and "No space left on device" in again.text
    verdict = head.record["verdict"]
    assert (verdict["kind"], verdict["node"]) == ("disk_full", 0)
    attached = head.command("orchestrator", "attach").ends(4)
    assert attached.lines[-1] == f"orchestrator: what to do: {verdict['fix']}"


def test_cut_between_ranks_alone_is_named(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    """Both nodes answer the head; what the ranks say of each other is all there is."""
    cluster = netns_cluster(2, second_nic=True)
    head = Head(cluster, tmp_path)
    text = "join(2)\nprint('joined', flush=True)\nwhile True:\n    dist.all_reduce(torch.ones(1))\n"
    script = head.script("train.py", BEGIN + text)
    command = head.launch("--nproc", "1", "--env", "GLOO_SOCKET_IFNAME=fab0", script)
    for _ in range(2):
        command.wait_for("joined")
    cluster.cut(1, nic=1)
    assert command.finish() == 1, command.text
    verdict = head.record["verdict"]
    assert verdict["kind"] == "communication", verdict
    assert "let firewalls pass" in verdict["fix"]
    assert head.nothing_left()
