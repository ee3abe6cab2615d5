"""The faults of one host of a cluster, and their repair.

Both kinds of cluster share these verbs; hosts are counted from 0. A host has a directory with the
files of its sshd, and a way to start a program inside of it; all else follows from that.
"""

import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.local_cluster.cluster import write_key

LISTENER = """
import select, socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=64)
print("listening", flush=True)
held = []
while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
    held.append(server.accept()[0])
    held[-1].sendall(sys.argv[3].encode())
"""


class Faults:
    """Mixed into a cluster that has these attributes and the methods that raise below."""

    directory: Path
    ssh_config: Path
    addresses: list[str]
    hung: dict[int, subprocess.Popen[str]]

    def popen(self, i: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        raise NotImplementedError

    def home(self, i: int) -> Path:
        """$HOME of host `i`, as a path that this process can open."""
        raise NotImplementedError

    def run_home(self, i: int) -> Path:
        """Where host `i` keeps what it knows of our jobs, as a path that this process can open."""
        raise NotImplementedError

    def processes(self, i: int, tag: str) -> list[int]:
        """Pids, as host `i` numbers them, of its processes whose environment contains `tag`."""
        raise NotImplementedError

    def kill(self, i: int, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a pid as host `i` numbers it; after SIGKILL it is dead."""
        raise NotImplementedError

    def spawn_sshd(self, i: int) -> None:
        """Start the sshd of host `i` and return once it answers."""
        raise NotImplementedError

    def end_sshd(self, i: int) -> None:
        """End the sshd of host `i` and its sessions; what they detached lives on."""
        raise NotImplementedError

    def listens_at(self, i: int) -> tuple[str, int]:
        """The address and port of the sshd of host `i`, as that host sees them."""
        raise NotImplementedError

    def node(self, i: int) -> Path:
        """Where host `i` has its sshd's configuration, keys and log."""
        return self.directory / f"node{i}"

    def exec(self, i: int, argv: Sequence[str], timeout: float = 30) -> str:
        """Return the output of a program that runs inside host `i` without SSH; it must succeed."""
        process = self.popen(i, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"{argv} on host {i}: {process.returncode}: {err or out}"
        return out

    def ssh_words(self, i: int, command: str) -> list[str]:
        """Return the ssh command line that runs `command` on host `i`."""
        options = ["-F", str(self.ssh_config), "-o", "ConnectTimeout=2"]
        return ["ssh", *options, self.addresses[i], command]

    def ssh(self, i: int, command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.ssh_words(i, command),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def write_list(self, lines: Iterable[str], name: str = "other_list.txt") -> Path:
        path = self.directory / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def kill_sshd(self, i: int) -> None:
        """Connections to host `i` are refused and its sessions end; detached processes live on."""
        self.end_sshd(i)

    def start_sshd(self, i: int) -> None:
        """A true sshd answers on host `i` again, after `kill_sshd` or `hang_handshake`."""
        self._end_hung(i)
        self.spawn_sshd(i)

    def hang_handshake(self, i: int, banner: str = "") -> None:
        """The SSH port of host `i` accepts and never speaks, or says `banner` and stalls."""
        self.end_sshd(i)
        address, port = self.listens_at(i)
        words = [sys.executable, "-S", "-c", LISTENER, address, str(port), banner]
        listener = self.popen(i, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        self.hung[i] = listener

    def change_host_key(self, i: int) -> None:
        """Host `i` shows another key than the one in known_hosts; its sessions end."""
        key = self.node(i) / "host_key"
        key.rename(self.node(i) / "true_host_key")
        write_key(key)
        self._restart(i)

    def restore_host_key(self, i: int) -> None:
        (self.node(i) / "true_host_key").rename(self.node(i) / "host_key")
        self._restart(i)

    def deny_keys(self, i: int) -> None:
        """Host `i` refuses new logins; existing sessions go on."""
        keys = self.node(i) / "authorized_keys"
        keys.rename(self.node(i) / "denied_keys")

    def allow_keys(self, i: int) -> None:
        (self.node(i) / "denied_keys").rename(self.node(i) / "authorized_keys")

    def noisy_rc(self, i: int, text: str) -> None:
        """Every command over SSH prints `text` to stdout first, as many a .bashrc does."""
        (self.home(i) / "noise").write_text(text)
        (self.home(i) / ".bashrc").write_text('cat "$HOME/noise"\n')

    def quiet_rc(self, i: int) -> None:
        (self.home(i) / ".bashrc").unlink()

    def _restart(self, i: int) -> None:
        self.end_sshd(i)
        self.start_sshd(i)

    def _end_hung(self, i: int) -> None:
        listener = self.hung.pop(i, None)
        if listener is not None:
            # The listener ends at the end of its standard input.
            listener.communicate()
