"""Measure the report of a long training: the time to make it, its size, the time to open it.

    python scripts/bench/views.py [--steps 1000000] [--ranks 64]
    python scripts/bench/views.py --hosts 64     the first screen of top, and its processor time
    python scripts/bench/views.py --sampler      what a node's sampler costs

The metrics are lines as the engine writes them. The files of the ranks are one file under many
names, so that the disk of a laptop holds them; each is read as if it were its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

PER_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--sampler", action="store_true")
    options = parser.parse_args()
    if options.sampler:
        sampler()
    elif options.hosts:
        top(options.hosts)
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure the page of a long training: its making, and its opening in a browser."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size = make(root / "long_20260101_000000", options.steps, options.ranks)
        sample_machines(root / "long_20260101_000000", options.ranks // PER_NODE, options.steps)
        print(f"{options.steps:,} steps x {options.ranks} ranks, {size / 1e9:.2f} GB of each rank")
        begin = time.perf_counter()
        command = [sys.executable, "-m", "orchestrator", "report", "--experiments", str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"made in          {time.perf_counter() - begin:6.1f} s")
        page = root / "long_20260101_000000" / "report.html"
        print(f"size             {page.stat().st_size / 1e6:6.2f} MB")
        empty = root / "empty.html"
        empty.write_text("<!doctype html><p>nothing")
        times = [opened(each, root) for each in (empty, page, empty, page, empty, page)]
        print(
            f"opened and drawn {min(times[1::2]) - min(times[::2]):6.2f} s more than an empty page"
        )


def make(path: Path, steps: int, ranks: int) -> int:
    """Write an experiment; return the bytes of one rank's metrics."""
    (path / "outputs").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    nodes = [
        NodeRecord(
            index=index,
            name=f"gpu{index}",
            host=f"gpu{index}",
            user=None,
            port=None,
            address=f"10.0.0.{index}",
            python="python",
            first_rank=index * PER_NODE,
            nproc=PER_NODE,
        )
        for index in range(ranks // PER_NODE)
    ]
    record = JobRecord("long", str(path), "running", ["master_launch"], nodes, time.time())
    Experiment(path).write_record(record)
    first = path / "outputs" / "rank_00_metrics.jsonl"
    with first.open("w") as file:
        for step in range(1, steps + 1):
            loss = 2.0 + 3.0 * math.exp(-step / 50_000) + 0.1 * math.sin(step * 12.9898)
            line = {
                "time": 1.7e9 + step * 0.3,
                "rank": 0,
                "step": step,
                "epoch": step // 10_000,
                "loss": loss,
                "lr": 3e-4 * math.cos(step / steps),
                "grad_norm": 1.0 / loss,
                "tokens": step * 524_288,
                "tokens_per_s": 1.7e6 + step % 977,
                "step_ms": 300.0 + step % 13,
                "data_ms": 1.5 + step % 7,
                "forward_backward_ms": 280.0 + step % 11,
                "exposed_comm_ms": None,
                "optimizer_ms": 9.0 + step % 3,
                "memory_bytes": 60_000_000_000 + step,
                "memory_peak_bytes": 70_000_000_000,
                "mfu": 0.41,
                "mfu_measured": 0.55,
                "skipped_steps": 0,
            }
            file.write(json.dumps(line) + "\n")
    for rank in range(1, ranks):
        os.link(first, path / "outputs" / f"rank_{rank:02d}_metrics.jsonl")
    return first.stat().st_size


def sample_machines(path: Path, nodes: int, steps: int) -> None:
    """Write the streams of the nodes' samplers for as long as the training took."""
    gpu = {
        "use": [0.97] * 8,
        "memory_bytes": [60 << 30] * 8,
        "celsius": [61] * 8,
        "watts": [650.5] * 8,
        "mhz": [1980] * 8,
        "throttle": [0] * 8,
    }
    first = path / "outputs" / "node_00_metrics.jsonl"
    began = Experiment(path).read_record().started
    with first.open("w") as file:
        for at in range(int(steps * 0.3 / 5)):
            line = {
                "time": began + 5 * at,
                "node": 0,
                "cpu": 0.2 + at % 7 / 100,
                "memory_bytes": 1 << 38,
                "disk_read_per_s": at,
                "disk_write_per_s": 5 * at,
                "gpu": gpu,
                "net": {"eth0": [10_000 + at, 20_000], "mlx5_0/1": [3_000_000_000, 3_000_000_000]},
            }
            file.write(json.dumps(line) + "\n")
    for node in range(1, nodes):
        os.link(first, path / "outputs" / f"node_{node:02d}_metrics.jsonl")


def top(hosts: int, seconds: float = 30.0) -> None:
    """Measure top on a terminal: the first screen of nodes, and its processor time afterwards.

    The hosts' own work is on this machine as well; each of their servers starts with the first
    sample.
    """
    from orchestrator.local_cluster.cluster import LoopbackCluster

    with tempfile.TemporaryDirectory() as name, LoopbackCluster(hosts, Path(name)) as cluster:
        own = [sys.executable, "-m", "orchestrator", "top", "--every", "1"]
        own += ["--nodes", str(cluster.node_list), "--ssh-config", str(cluster.ssh_config)]
        own += ["--experiments", name]
        load, begin = os.getloadavg()[0], time.perf_counter()
        pid, terminal = pty.fork()
        if not pid:
            os.environ.update(TERM="xterm-256color", COLUMNS="140", LINES="80")
            os.execv(sys.executable, [*map(str, own)])
        shown = b""
        first: float | None = None
        while f"{hosts} of {hosts} nodes".encode() not in shown:
            shown += os.read(terminal, 1 << 16)
            if first is None and b" nodes, " in shown:
                first = time.perf_counter() - begin
        print(f"first screen of {hosts} hosts {first:6.2f} s, all reached after", end=" ")
        print(f"{time.perf_counter() - begin:.2f} s, load {load:.0f}")
        threading.Thread(target=drain, args=(terminal,), daemon=True).start()
        # After this time, slow nodes are sampled like the others.
        time.sleep(5.0)
        before = ticks(pid)
        time.sleep(seconds)
        used = ticks(pid) - before
        print(f"top at a look a second    {used / seconds:6.1%} of a core")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for tool in ("nvitop", "gpustat"):
        there = shutil.which(tool) and Path("/dev/nvidiactl").exists()
        print(
            f"{tool}: {'to be timed by hand' if there else 'needs a GPU of NVIDIA: not measured'}"
        )


def drain(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def ticks(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def sampler() -> None:
    """Measure this process's processor time for an hour's samples, taken in a row."""
    from orchestrator.node.machine.sampler import Sampler
    from orchestrator.protocol.message import decode_value
    from orchestrator.protocol.spec import Spec

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "outputs").mkdir()
        fields = {
            "job": "job",
            "node": 0,
            "nnodes": 1,
            "experiment": "e",
            "nproc": 1,
            "first_rank": 0,
            "start": "plain",
            "agent": [],
            "env": {"ORCHESTRATOR_EXPERIMENT": name},
            "unset": [],
            "workdir": name,
            "target": {"kind": "script", "name": "x"},
        }
        own = Sampler(decode_value(Spec, fields), seconds=0.01)
        began = time.process_time()
        for _ in range(720):
            own.sample()
            time.sleep(0.01)
        used = time.process_time() - began
        size = (Path(name) / "outputs/node_00_metrics.jsonl").stat().st_size
    print(f"an hour of samples takes {used:.2f} s, {used / 3600:.3%} of a core; {size} bytes")


def opened(page: Path, root: Path) -> float:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("views.py needs Chromium: apt-get install chromium")
    begin = time.perf_counter()
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={root / 'profile'}"
    subprocess.run([*command, profile, page.as_uri()], check=True, capture_output=True, timeout=300)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
