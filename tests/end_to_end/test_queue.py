"""Launches on the same two hosts: one has them, others are refused or wait for their turn."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.protocol.requests.claims import RUNNING, WAITING
from tests.clusters.netns import NetnsCluster
from tests.launching import PATIENCE, Command, Head

# Runs until a file is there, in a directory that the hosts share with the test.
UNTIL = """
import os, sys, time
print("running", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
QUICK = ("--no-torchrun", "--check", "none")


class Line:
    """A user whose launches all request every GPU of both hosts."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.script = head.script("until.py", UNTIL)
        self.running: list[tuple[Command, Path]] = []

    def launch(self, name: str, *words: str) -> Command:
        end = self.head.directory.parent / f"{self.head.directory.name}-{name}"
        command = self.head.launch(*QUICK, "--name", name, *words, self.script, str(end))
        self.running.append((command, end))
        return command

    def end(self, command: Command) -> None:
        next(end for each, end in self.running if each is command).touch()
        assert command.finish() == 0, command.text

    def shown(self) -> list[dict[str, Any]]:
        command = self.head.command("orchestrator", "nodes", "--queue", "--json").ends()
        jobs: list[dict[str, Any]] = json.loads(command.text)["jobs"]
        return jobs

    def until(self, fits: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        while not fits(jobs := self.shown()):
            assert time.monotonic() < deadline, jobs
            time.sleep(0.5)
        return jobs


@pytest.fixture
def line(head: Head) -> Iterator[Line]:
    line = Line(head)
    yield line
    for command, end in line.running:
        end.touch()
        if command.process.poll() is None:
            command.finish()


def test_queue_grants_hosts_in_order(line: Line) -> None:
    first = line.launch("first", "--claim", "all")
    first.wait_for("running")
    refused = line.launch("refused", "--claim", "all").ends(3)
    assert "what it wants of them is not free; nothing was started" in refused.text
    assert re.search(r"slot 0: \S+, job first_", refused.text)
    assert "--queue" in refused.text
    none = line.launch("none", "--gpus", "2").ends(3)
    assert "has no GPU, and 2 are wanted" in none.text

    second = line.launch("second", "--queue")
    second.wait_for(r"in the queue: .* 0 of 1 free; .*first_.* has them")
    third = line.launch("third", "--queue")
    third.wait_for("in the queue")
    jobs = line.until(lambda jobs: len(jobs) == 3)
    assert [(job["job"].partition("_")[0], job["state"], job["place"]) for job in jobs] == [
        ("first", RUNNING, None),
        ("second", WAITING, 1),
        ("third", WAITING, 2),
    ]
    assert len(jobs[1]["nodes"]) == 2

    second.interrupt(signal.SIGKILL)
    line.until(lambda jobs: [job["place"] for job in jobs] == [None, 1])
    line.head.cluster.kill_sshd(1)
    third.wait_for("connecting again")
    line.head.cluster.start_sshd(1)
    line.until(lambda jobs: [job["place"] for job in jobs] == [None, 1])
    first.interrupt(signal.SIGKILL)
    assert [job["state"] for job in line.shown()] == [RUNNING, WAITING]
    line.head.command("orchestrator", "stop", line.shown()[0]["job"].rpartition("-")[0]).ends()
    third.wait_for("running")
    line.end(third)
    assert line.shown() == []


# What the driver has of four GPUs, in /proc and /dev of one host.
FOUR_GPUS = """
set -e
mkdir -p {place} && mount -t tmpfs gpus {place} && mkdir {place}/over {place}/work
mount -t overlay gpus -o lowerdir=/dev,upperdir={place}/over,workdir={place}/work /dev
for at in 0 1 2 3; do
    touch /dev/nvidia$at
    mkdir -p {place}/driver/nvidia/gpus/0000:0$at:00.0
    printf 'Model: NVIDIA H100\nGPU UUID: GPU-%s\nDevice Minor: %s\n' $at $at \
        >{place}/driver/nvidia/gpus/0000:0$at:00.0/information
done
mount --bind {place}/driver /proc/driver
"""
NO_GPUS = "umount -l /proc/driver /dev {place}"


@pytest.fixture
def gpus(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    cluster = line.head.cluster
    if not isinstance(cluster, NetnsCluster):
        pytest.skip("a /proc and /dev of its own has a host in a namespace alone")
    place = tmp_path_factory.mktemp("gpus")
    made = FOUR_GPUS.format(place=place)
    for node in (0, 1):
        assert cluster.popen(node, ["sh", "-c", made]).wait() == 0
    yield
    for node in (0, 1):
        assert cluster.popen(node, ["sh", "-c", NO_GPUS.format(place=place)]).wait() == 0


SEEN = UNTIL.replace('print("running"', 'print("sees", os.environ.get("CUDA_VISIBLE_DEVICES")')


def test_two_jobs_share_gpus_of_hosts(line: Line, gpus: None) -> None:
    line.script = line.head.script("seen.py", SEEN)
    first = line.launch("first", "--gpus", "1")
    first.wait_for_all(r"orchestrator: GPU 0 of 4 on ", "is not known: nvidia-smi is not installed")
    first.wait_for_all("node0 .*sees GPU-0$", "node1 .*sees GPU-0$")
    # One program requests both.
    second = line.launch("second", "--gpus", "2")
    second.wait_for_all(*(f"node{node} .*sees GPU-1,GPU-2$" for node in (0, 1)))
    # This launch requests all GPUs.
    refused = line.launch("refused").ends(3)
    assert re.search(r"GPU 0: \S+ job first_\S+; GPU 1-2: \S+ job second_", refused.text)
    by_name = line.launch("by_name", "--env", "CUDA_VISIBLE_DEVICES=3")
    by_name.wait_for("node0 .*sees 3$")
    shared = line.launch("shared", "--claim", "none")
    shared.wait_for("node0 .*sees None$")
    for command in (first, second, by_name, shared):
        line.end(command)


def test_queue_without_claim_is_refused(line: Line) -> None:
    command = line.launch("wrong", "--queue", "--claim", "none").ends(2)
    assert "--queue waits for GPUs to hold" in command.text
