"""What Compose and Kubernetes do with a file before a container runs, and containers to run in.

Neither Docker's daemon nor a kubelet can run here. A container is what they make one of: a process
1 in namespaces of its own, with a host name, names of the others, and the environment.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.clusters.netns import NetnsCluster
from tests.launching import Command

# Becomes process 1, as a container's program does.
START = 'echo "$1" > /proc/sys/kernel/hostname; cd "$2"; shift 2; exec "$@"'
UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
IN_COMPOSE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|)")


def composed(text: str, environ: Mapping[str, str]) -> str:
    """Compose's interpolation, of https://docs.docker.com/reference/compose-file/interpolation."""

    def put(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        assert name, f"invalid interpolation format in {text!r}"
        return environ.get(name, "")

    return IN_COMPOSE.sub(put, text)


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME): k8s.io/kubernetes/third_party/forked/golang/expansion."""

    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)


class Containers:
    """Containers on the hosts of a cluster; their image is this machine."""

    def __init__(self, cluster: NetnsCluster, workdir: Path) -> None:
        self.cluster = cluster
        self.workdir = workdir
        self.hosts = cluster.directory / "hosts"
        self.first = self.hosts.read_text()

    def name(self, i: int, *names: str) -> None:
        """The cluster's name server knows a container from now on."""
        with self.hosts.open("a") as file:  # the very file that is mounted
            file.write(f"{self.cluster.addresses[i]} {' '.join(names)}\n")

    def forget(self) -> None:
        self.hosts.write_text(self.first)

    def terminate(self, i: int, mark: str) -> None:
        """SIGTERM to process 1 of the container with this in its environment."""
        first = min(self.cluster.processes(i, mark))
        subprocess.run(self.cluster.words(i, ["kill", "-TERM", str(first)]), check=True)

    def run(self, i: int, hostname: str, words: list[str], env: Mapping[str, str]) -> Command:
        first = [*UNSHARE, "sh", "-c", START, "sh", hostname, str(self.workdir)]
        setting = [f"{name}={value}" for name, value in env.items()]
        argv = self.cluster.words(i, [*first, "env", *setting, *words])
        return Command(argv, self.workdir, {})
