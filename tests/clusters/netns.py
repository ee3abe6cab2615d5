"""Several hosts on one machine, as root: namespaces on a bridge, each with its own sshd on port 22.

A host has its own network, hostname, process ids, /proc, /sys, /dev/shm, /etc/hosts and home. The
bridge lives in a namespace too. None of them has a name: each lives as long as a small shell that
reads our pipe, so they are gone with this process, even after a kill -9. All that the machine
itself gets is one veth end, `orc<K>`, and that goes with the bridge.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.local_cluster.cluster import (
    await_banner,
    client_config,
    kill_processes,
    own_login,
    penalty_options,
    sshd_config,
    sshd_program,
    write_key,
)
from tests.clusters import library
from tests.clusters.faults import Faults
from tests.clusters.namespace import (
    HOST,
    SPACES,
    SWITCH,
    answers,
    cover,
    inside,
    only_child,
    python_first,
    shell,
)

# Editable packages in our Python point into it.
CLONE = Path(__file__).parents[2]
# This is the last number of the head's own address.
HEAD = 254
# No machine has this MAC address.
NOBODY = "02:00:00:00:00:99"
# Every port of the bridge is in this group, so one command deletes them all.
GROUP = "77"


class NetnsCluster(Faults):
    """`with NetnsCluster(2, directory) as cluster: ...`; the head is this process.

    tmpfs: directories that each host has for itself, in memory and of limited size, so that they
    can be filled up; the home directory may be one of them.
    second_nic: another interface, `fab0`, on a network 10.78.K.0/24 of the hosts alone, without the
    head. ipv6: the hosts have no IPv4 address.
    """

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        slots: int | None = None,
        tmpfs: Iterable[str | Path] = (),
        tmpfs_size: str = "64m",
        second_nic: bool = False,
        ipv6: bool = False,
    ) -> None:
        self.directory = directory.absolute()
        self.size = size
        self.slots = slots
        self.tmpfs = [str(path) for path in tmpfs]
        self.tmpfs_size = tmpfs_size
        self.second_nic = second_nic
        self.ipv6 = ipv6
        self.key = self.directory / "key"
        self.known_hosts = self.directory / "known_hosts"
        self.node_list = self.directory / "node_ip_list.txt"
        self.ssh_config = self.directory / "ssh_config"
        self.hostnames = [f"host{i}" for i in range(size)]
        self.addresses: list[str] = []
        self.fabric: list[str] = []
        self.hung: dict[int, subprocess.Popen[str]] = {}
        self.home_path = pwd.getpwuid(os.geteuid()).pw_dir
        self.environment = {"PATH": python_first(), "OMP_NUM_THREADS": "1"}
        self._subnet = 0
        self._switch: subprocess.Popen[str] | None = None
        self._shells: list[subprocess.Popen[str]] = []
        self._inits: list[int] = []
        self._sshd: list[str] = []

    def __enter__(self) -> NetnsCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Every host up, connected and answering on port 22."""
        everyone = range(self.size)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            self._switch = shell(SWITCH, self.directory / "switch.log")
            answers([self._switch], ["true"])
            self._take_a_subnet()
            self._write()
            self._shells = [shell(HOST, self.node(i) / "init.log") for i in everyone]
            answers(self._shells, ["true"] * self.size)
            self._inits = [only_child(host.pid) for host in self._shells]
            inside(self._switch.pid, ["ip", "-batch", "-"], self._wiring())
            answers(self._shells, [self._set_up(i) for i in everyone])
            answers(self._shells, [self._sshd_line(i) for i in everyone])
            for i in everyone:
                self._await(i)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Every process on every host ends, and the networks go; again does nothing."""
        for i in list(self.hung):
            self._end_hung(i)
        if self._switch is not None and self._subnet:
            # Links before namespaces, which go later and link by link: gone when this returns.
            with contextlib.suppress(AssertionError):
                inside(self._switch.pid, ["ip", "link", "delete", "group", GROUP])
        shells = [*self._shells, *([self._switch] if self._switch else [])]
        for host in shells:
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                host.stdin.close()
        for host in shells:
            host.wait(timeout=20)
            assert host.stdout is not None
            host.stdout.close()
        self._shells, self._inits, self._switch, self._subnet = [], [], None, 0

    # Being one host

    def popen(self, i: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.words(i, argv), text=True, **options)

    def words(self, i: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs a program inside host `i` with a clean environment."""
        home = self.home_path
        setting = [f"{name}={value}" for name, value in self.environment.items()]
        clean = ["env", "-i", f"--chdir={home}", f"HOME={home}", *setting]
        enter = ["nsenter", "--target", str(self._inits[i]), *SPACES, *clean]
        return [*enter, *argv]

    def path(self, i: int, path: str | Path) -> Path:
        """Return the path by which this process can open host `i`'s `path`."""
        return Path(f"/proc/{self._inits[i]}/root{path}")

    def home(self, i: int) -> Path:
        return self.path(i, self.home_path)

    def run_home(self, i: int) -> Path:
        return self.home(i) / ".orchestrator"

    def processes(self, i: int, tag: str) -> list[int]:
        return [p for p in self._pids(i) if tag in self._read(i, p, "environ")]

    def kill(self, i: int, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        outside = self._numbers_outside(i)[pid]
        kill_processes([outside]) if number == signal.SIGKILL else os.kill(outside, number)

    def spawn_sshd(self, i: int) -> None:
        answers([self._shells[i]], [self._sshd_line(i)])
        self._await(i)

    def end_sshd(self, i: int) -> None:
        # One round is enough unless a connection arrived during it.
        while self._sshd_pids(i):
            outside = self._numbers_outside(i)
            kill_processes(outside[p] for p in self._sshd_pids(i) if p in outside)

    def listens_at(self, i: int) -> tuple[str, int]:
        return self.addresses[i], 22

    # Faults that need a network or a disk of one's own

    def cut(self, i: int, nic: int | None = None) -> None:
        """Drop all traffic of host `i` without a reset. nic 1 is the second network."""
        for port in self._ports(i, nic):
            self._on_switch(["ip", "link", "set", port, "down"])

    def restore(self, i: int, nic: int | None = None) -> None:
        for port in self._ports(i, nic):
            self._on_switch(["ip", "link", "set", port, "up"])

    def slow(self, i: int, rate: str) -> None:
        """At most `rate` to and from host `i`."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        for pid, device in ((self._switch_pid(), f"h{i}"), (self._inits[i], "eth0")):
            try:
                inside(pid, ["tc", "qdisc", "replace", "dev", device, "root", *shape])
            except AssertionError as error:
                if "qdisc kind is unknown" not in str(error):
                    raise
                # No package brings a kernel module: a machine that lacks nothing else may skip.
                pytest.skip(f"this kernel cannot do 'tc qdisc ... {shape}' (modprobe sch_tbf)")

    def fill_disk(self, i: int, path: str | Path) -> None:
        """Not a byte is left on the private disk of host `i` that holds `path`."""
        assert any(Path(t) in [Path(path), *Path(path).parents] for t in self.tmpfs), (
            f"{path} is not in {self.tmpfs}: this would fill the disk of the machine"
        )
        try:
            with self._filler(i, path).open("ab", buffering=0) as filler:
                for size in (1 << 20, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while filler.write(bytes(size)):
                            pass
                filler.write(b"0")
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise AssertionError(f"{path} on host {i} did not fill up")

    def free_disk(self, i: int, path: str | Path) -> None:
        self._filler(i, path).unlink()

    def vanish(self, i: int | None, address: str) -> None:
        """Drop the packets of host `i` to an address: they go to a MAC address without a machine.

        None is the head. Other ways, and the way back, stay as they are.
        """
        self._neighbour(i, ["replace", address, "lladdr", NOBODY, "nud", "permanent"])

    def arrive(self, i: int | None, address: str) -> None:
        """Deliver the packets of host `i` to an address again."""
        self._neighbour(i, ["delete", address])

    def power_off(self, i: int, *, disk_lost: bool = False) -> None:
        """Kill all processes of host `i` at once, unseen by others; its memory is empty then.

        Its private disks (`tmpfs`) are too, if they are lost with it.
        """
        self.cut(i)
        answers([self._shells[i]], ["kill -KILL -1; true"])
        # Process 1 is the shell that runs this command.
        while len(self._pids(i)) > 1:
            answers([self._shells[i]], ["true"])
        for place in ["/dev/shm", *(self.tmpfs if disk_lost else [])]:
            everything = ["find", place, "-xdev", "-mindepth", "1", "-delete"]
            # What shines through from the machine is on another device, and stays.
            answers([self._shells[i]], [f"{shlex.join(everything)} 2> /dev/null; true"])

    def power_on(self, i: int) -> None:
        self.restore(i)
        self.spawn_sshd(i)

    # How it is made

    def _take_a_subnet(self) -> None:
        """The first K whose link can be made is ours: no other process can make it as well."""
        for attempt in range(250):
            k = (os.getpid() + attempt) % 250 + 1
            peer = ["type", "veth", "peer", "name", "head", "netns", str(self._switch_pid())]
            link = subprocess.run(
                ["ip", "link", "add", f"orc{k}", *peer], capture_output=True, text=True, check=False
            )
            if link.returncode == 0:
                break
            assert "exists" in link.stderr, link.stderr
        else:
            raise AssertionError("250 clusters run already")
        self._subnet = k
        self.addresses = [self._address(i) for i in range(self.size)]
        self.fabric = [f"10.78.{k}.{i + 1}" for i in range(self.size)] if self.second_nic else []
        lines = f"address add {self._on_network(HEAD - 1)} dev orc{k}\nlink set orc{k} up\n"
        subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)

    def _write(self) -> None:
        names = [f"{self._address(HEAD - 1)} head", "127.0.0.1 localhost", "::1 localhost"]
        names += map("{} {}".format, self.addresses, self.hostnames)
        self.write_list(names, "hosts")
        self.write_list(
            (f"{a} slots={self.slots}" if self.slots else a for a in self.addresses),
            self.node_list.name,
        )
        authorized, known = write_key(self.key), ""
        for i, address in enumerate(self.addresses):
            (self.node(i) / "home").mkdir(parents=True, mode=0o700)
            library.give_to(self.node(i) / "home/.orchestrator")
            known += f"{address} {write_key(self.node(i) / 'host_key')}"
            (self.node(i) / "authorized_keys").write_text(authorized)
            config = sshd_config(
                "::" if self.ipv6 else "0.0.0.0", 22, self.node(i), self.environment
            )
            (self.node(i) / "sshd_config").write_text(config)
        self.known_hosts.write_text(known)
        self.ssh_config.write_text(client_config(22, self.key, self.known_hosts, own_login()))
        program = sshd_program()
        self._sshd = [program, *penalty_options(program, self.node(0) / "sshd_config")]

    def _wiring(self) -> str:
        lines = ["link set dev head group 77", "link add br0 group 77 type bridge"]
        lines += ["link set br0 up", "link set head master br0 up"]
        if self.second_nic:
            lines += ["link add br1 group 77 type bridge", "link set br1 up"]
        for i, init in enumerate(self._inits):
            for number, port in enumerate(self._ports(i)):
                peer = ["eth0", "fab0"][number]
                veth = f"type veth peer name {peer} netns {init}"
                lines.append(f"link add {port} group {GROUP} {veth}")
                lines.append(f"link set {port} master br{number} up")
        return "\n".join(lines) + "\n"

    def _set_up(self, i: int) -> str:
        lines = ["link set lo up"]
        own = [self._on_network(i), *(f"{fabric}/24" for fabric in self.fabric[i : i + 1])]
        for address, nic in zip(own, ["eth0", "fab0"], strict=False):
            lines += [f"address add {address} dev {nic}", f"link set {nic} up"]
        steps = [
            f"echo {self.hostnames[i]} > /proc/sys/kernel/hostname",
            "mount -t sysfs sysfs /sys",
            "mount -t tmpfs private /dev/shm",
            f"mount --bind {shlex.quote(str(self.directory / 'hosts'))} /etc/hosts",
            "ip -batch - <<< $'" + "\\n".join(lines) + "'",
        ]
        # The home first: TMPDIR may be below it, and with it the private disks.
        for place in [*([] if self.home_path in self.tmpfs else [self.home_path]), *self.tmpfs]:
            new = f"-t tmpfs -o size={self.tmpfs_size} private"
            if place not in self.tmpfs:
                new = f"--bind {shlex.quote(str(self.node(i) / 'home'))}"
            prefixes = (sys.base_prefix, sys.prefix, tempfile.gettempdir())
            kept = [self.node(i), CLONE, *map(Path, prefixes)]
            steps += cover(place, new, kept)
        return " && ".join(steps)

    def _sshd_line(self, i: int) -> str:
        files = ["-f", str(self.node(i) / "sshd_config"), "-E", str(self.node(i) / "sshd.log")]
        return shlex.join([*self._sshd, *files])

    def _await(self, i: int) -> None:
        log = self.node(i) / "sshd.log"
        await_banner(self.addresses[i], 22, lambda: not self._sshd_pids(i), log)

    def _switch_pid(self) -> int:
        assert self._switch is not None
        return self._switch.pid

    def _on_switch(self, argv: Sequence[str]) -> None:
        inside(self._switch_pid(), argv)

    def _neighbour(self, i: int | None, words: list[str]) -> None:
        device = "eth0" if i is not None else f"orc{self._subnet}"
        inside(os.getpid() if i is None else self._inits[i], ["ip", "neigh", *words, "dev", device])

    def _ports(self, i: int, nic: int | None = None) -> list[str]:
        ports = [f"h{i}", f"f{i}"] if self.second_nic else [f"h{i}"]
        return ports if nic is None else [ports[nic]]

    def _address(self, i: int) -> str:
        return f"fd77:{self._subnet}::{i + 1}" if self.ipv6 else f"10.77.{self._subnet}.{i + 1}"

    def _on_network(self, i: int) -> str:
        """The address of host `i` with its network, as `ip address add` takes it."""
        return f"{self._address(i)}/64 nodad" if self.ipv6 else f"{self._address(i)}/24"

    def _filler(self, i: int, path: str | Path) -> Path:
        return self.path(i, path) / ".filled"

    def _pids(self, i: int) -> list[int]:
        return [int(p.name) for p in self.path(i, "/proc").iterdir() if p.name.isdigit()]

    def _read(self, i: int, pid: int, name: str) -> str:
        try:
            return self.path(i, f"/proc/{pid}/{name}").read_text(errors="replace")
        except OSError:
            # It has ended since the listing.
            return ""

    def _sshd_pids(self, i: int) -> list[int]:
        return [p for p in self._pids(i) if self._read(i, p, "comm").startswith("sshd")]

    def _numbers_outside(self, i: int) -> dict[int, int]:
        """Pid as the host numbers it -> pid as this process does."""
        space = Path(f"/proc/{self._inits[i]}/ns/pid").readlink()
        numbers = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (entry / "ns/pid").readlink() == space:
                        status = (entry / "status").read_text()
                        inner = status.partition("NSpid:")[2].split("\n")[0].split()[-1]
                        numbers[int(inner)] = int(entry.name)
        return numbers
