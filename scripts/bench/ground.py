"""Parts shared by the benchmarks: hosts made for one run, a head that sees them, rounds, tables.

The hosts are network namespaces on this machine, so root is needed and nothing leaves it. Every
contender runs as the head: same ssh_config, same /etc/hosts, same clock as the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.clusters.netns import NetnsCluster  # noqa: E402

Cluster = NetnsCluster
# One word of a command line.
Word = str | Path
# Outside $HOME, which is private to each host.
PEERS = Path("/var/tmp/orchestrator-peers")
# Set in the network namespace of a bench.
OWN_NETWORK = "ORCHESTRATOR_BENCH_NETWORK"
# Seconds for one run of one contender.
LIMIT = 180.0
# The head's own /etc/hosts with the hosts' names, and the ssh_config that every ssh reads.
HEAD = (
    'hostname head && mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/ssh/ssh_config'
    ' && shift 2 && exec "$@"'
)


class Failed(Exception):
    """A contender did not finish its work; the table shows the message instead of a figure."""


@dataclass
class Contender:
    """One way to do the work: `run` does it once on the cluster and returns what it measured."""

    name: str
    run: Callable[[Cluster], Mapping[str, float]]
    # Why the contender cannot take part.
    missing: str = ""
    samples: list[Mapping[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        found = [sample[figure] for sample in self.samples if figure in sample]
        return statistics.median(found) if found else None


def compete(contenders: Sequence[Contender], hosts: int, repeat: int, note: str) -> None:
    """Run all contenders in turn, `repeat` times after a first round that only warms the caches.

    Round robin, so that other load on this machine affects all alike. A contender that fails drops
    out, and the hosts are created again, because it may have left something running there.
    """
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(fresh(hosts))
        for turn in range(repeat + 1):
            for one in contenders:
                if one.missing:
                    continue
                progress(f"{note}, round {turn} of {repeat}: {one.name}")
                try:
                    sample = one.run(cluster)
                except Failed as failure:
                    one.missing = f"failed: {failure}"
                    stack.close()
                    cluster = stack.enter_context(fresh(hosts))
                else:
                    one.samples += [sample] if turn else []
    progress("")


def progress(text: str) -> None:
    """Show what is being measured, for a human who waits for the table."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def fresh(hosts: int) -> Iterator[Cluster]:
    """Create hosts with their network and files; remove them all afterwards."""
    with tempfile.TemporaryDirectory(prefix="orchestrator-bench-") as directory:
        cluster = NetnsCluster(hosts, Path(directory) / "cluster")
        cluster.environment["DS_ACCELERATOR"] = "cpu"
        with cluster:
            yield cluster


def work_directory(cluster: Cluster) -> Path:
    """Return the directory for a run's files, which hosts and head share."""
    path = cluster.directory.parent / "work"
    path.mkdir(exist_ok=True)
    return path


def as_head(cluster: Cluster, words: Sequence[Word]) -> list[str]:
    """Return the command line that runs `words` on the head of the cluster."""
    files = (cluster.directory / "hosts", cluster.ssh_config)
    return ["unshare", "--mount", "--uts", "bash", "-c", HEAD, "head", *map(str, (*files, *words))]


class Ran(NamedTuple):
    """The output and memory of a command that succeeded."""

    said: str
    # The peak resident memory of the command itself.
    peak_kb: int
    # The processor seconds of the command and its children.
    processor: float


def run(cluster: Cluster, words: Sequence[Word], *, silent: bool = False) -> Ran:
    """Run a command on the head until it ends. Failed if it did not succeed.

    silent: its output goes to /dev/null, because recording it would cost time.
    """
    with tempfile.TemporaryFile("w+") as said:
        with on_head(cluster, words, subprocess.DEVNULL if silent else said, said) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if process.returncode:
        print(f"\n{text}", file=sys.stderr)
    done_well(process)
    return Ran(text, usage.ru_maxrss, usage.ru_utime + usage.ru_stime)


@contextlib.contextmanager
def on_head(
    cluster: Cluster, words: Sequence[Word], out: Any, errors: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command on the head with LIMIT seconds; kill all of it when this is left early."""
    process = subprocess.Popen(
        as_head(cluster, words),
        cwd=work_directory(cluster),
        env=head_environment(),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def done_well(process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        late = process.returncode == -signal.SIGKILL
        raise Failed(f"ended after {LIMIT:.0f} s" if late else f"exit code {process.returncode}")


def head_environment() -> dict[str, str]:
    """Return an environment of one thread per rank, without the developer's settings.

    The ranks share few cores.
    """
    kept = ("PATH", "HOME", "LANG", "TERM", "USER", "LOGNAME")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    return {**env, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def our(command: str) -> list[Word]:
    """Return one of our installed commands, made to run the code of this repository."""
    return ["env", f"PYTHONPATH={ROOT}", Path(sys.executable).with_name(command)]


def require_root() -> None:
    if os.geteuid() != 0:
        sys.exit("benchmarks run on hosts in network namespaces: run them as root")


def require_own_network() -> None:
    """Run again in a network namespace: no packet of others is counted, no port is taken."""
    require_root()
    if OWN_NETWORK not in os.environ:
        os.environ[OWN_NETWORK] = "1"
        lo = 'ip link set lo up && exec "$@"'
        words = ["unshare", "--net", "sh", "-c", lo, "sh", sys.executable, *sys.argv]
        os.execvp(words[0], words)


# -- this machine, and how results are shown ------------------------------------------------------


def machine(*pythons: Path) -> str:
    """Describe in one line what the figures were measured on."""
    words = [f"{os.cpu_count()} cores", f"Linux {os.uname().release}"]
    words.append(f"load {os.getloadavg()[0]:.1f}")
    for python in dict.fromkeys((Path(sys.executable), *pythons)):
        if python.exists():
            words.append(f"{python}: {versions(python)}")
    words.append(first_line("ssh", "-V").split(",")[0])
    return ", ".join(words)


def versions(python: Path) -> str:
    program = (
        "import sys, importlib.metadata as m\n"
        "names = ('torch', 'paramiko', 'torchrunx', 'deepspeed', 'torchmonarch')\n"
        "have = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print('Python', sys.version.split()[0], *(f'{n} {have[n]}' for n in names if n in have))"
    )
    return first_line(str(python), "-c", program)


def first_line(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table that is also easy to read unrendered."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def as_data(results: Mapping[str, Sequence[Contender]]) -> dict[str, Any]:
    """Return every sample of all shapes, or why a contender has none."""
    return {
        shape: {one.name: one.missing or one.samples for one in everyone}
        for shape, everyone in results.items()
    }


def show(as_json: bool, title: str, about: str, text: str, data: Any) -> None:
    if as_json:
        print(json.dumps({"machine": about, "results": data}, indent=1))
    else:
        print(f"{title}\n\n{about}\n\n{text}")
