"""What this machine is, for the plan: addresses, ways to the other nodes, GPUs, torch, the program.

Read from the kernel and the file system only: no command is run, nothing can hang on a driver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

RTM_GETADDR = 22
RTM_NEWADDR = 20
NLMSG_DONE = 3
NLM_F_REQUEST_DUMP = 0x301
IFA_ADDRESS = 1
IFA_LOCAL = 2
PORTS_TO_TRY = 200


def probe(request: dict[str, Any]) -> dict[str, Any]:
    workdir, found = find_workdir(request.get("workdir"), request["cwd"])
    addresses = interface_addresses()
    return {
        "hostname": socket.gethostname(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "torch": torch_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpu_count(),
        "addresses": [list(address) for address in addresses],
        "routes": {peer: list(route(peer, addresses)) for peer in request["peers"]},
        "workdir": workdir,
        "workdir_exists": found,
        "target": resolve_target(request["target"], workdir),
        "kernel": os.uname().release,
        "memory_kb": memory_kb(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def find_workdir(wanted: Any, cwd: str) -> tuple[str, bool]:
    path = os.path.expanduser(wanted or cwd)
    return path, os.path.isdir(path)


def torch_version() -> str:
    """Read, not imported: importing torch takes over a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        with open(
            os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8"
        ) as file:
            match = re.search(r"^__version__[^=]*= ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return match.group(1) if match else ""


def gpu_count() -> int:
    try:
        nvidia = sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    except OSError:
        nvidia = 0
    return nvidia or amd_count()


def amd_count() -> int:
    """KFD lists CPUs as nodes too; only GPUs have SIMD units."""
    count = 0
    root = "/sys/class/kfd/kfd/topology/nodes"
    try:
        for node in os.listdir(root):
            with open(os.path.join(root, node, "properties"), encoding="ascii") as file:
                match = re.search(r"^simd_count (\d+)", file.read(), re.MULTILINE)
            count += bool(match and int(match.group(1)))
    except OSError:
        return 0
    return count


def memory_kb() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return int(file.readline().split()[1])


# -- network ----------------------------------------------------------------------------------


def interface_addresses() -> list[tuple[str, str, int]]:
    """(interface, address, prefix length), from the kernel over netlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(2)
        header = struct.pack("=LHHLL", 17, RTM_GETADDR, NLM_F_REQUEST_DUMP, 1, 0)
        link.send(header + struct.pack("=B", socket.AF_UNSPEC))
        found: list[tuple[str, str, int]] = []
        while True:
            data = link.recv(1 << 18)
            while data:
                size, kind = struct.unpack_from("=LH", data)
                if kind == NLMSG_DONE or size < 16:
                    return found
                if kind == RTM_NEWADDR:
                    found.extend(one_address(data[16:size]))
                data = data[(size + 3) & ~3 :]


def one_address(message: bytes) -> Iterator[tuple[str, str, int]]:
    family, prefix, _, _, index = struct.unpack_from("=BBBBL", message)
    attributes = {}
    rest = message[8:]
    while len(rest) >= 4:
        size, kind = struct.unpack_from("=HH", rest)
        if size < 4:
            break
        attributes[kind] = rest[4:size]
        rest = rest[(size + 3) & ~3 :]
    raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
    if raw and family in (socket.AF_INET, socket.AF_INET6):
        yield socket.if_indextoname(index), socket.inet_ntop(family, raw), prefix


def route(peer: str, addresses: list[tuple[str, str, int]]) -> tuple[str, str]:
    """(interface, own address) by which the kernel would send to a peer; empty where it cannot."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((peer, 9))  # a UDP connect sends nothing
            own: str = probe_socket.getsockname()[0]
    except OSError:
        return "", ""
    for interface, address, _ in addresses:
        if address == own:
            return interface, own
    return ("lo", own) if own.startswith("127.") else ("", own)


class Port:
    """A TCP port held for a job until its supervisor ends, against a second launch just then.

    The TCP port itself must stay free for torchrun, so what is held is an abstract Unix socket of
    the port's name: it lives in the same network namespace and goes away with its last holder.
    """

    def __init__(self, wanted: int, exact: bool) -> None:
        self.holder = socket.socket(socket.AF_UNIX)
        self.number = 0
        for number in range(wanted, wanted + 1 if exact else min(wanted + PORTS_TO_TRY, 65536)):
            if port_is_free(number) and self.hold(number):
                self.number = number
                return

    def hold(self, number: int) -> bool:
        try:
            self.holder.bind(f"\0orchestrator-port-{number}")
        except OSError:
            return False
        return True


def port_is_free(number: int) -> bool:
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe_socket.bind((everywhere, number))
        except OSError as error:
            if family == socket.AF_INET or error.errno == 98:
                return False
    return True


# -- the program ------------------------------------------------------------------------------


def resolve_target(target: dict[str, str], workdir: str) -> dict[str, str]:
    """What kind of program this is here: "script" (Python), "module", "program", or why not."""
    kind, name = target["kind"], target["name"]
    if kind != "auto":
        return {"kind": kind, "name": name}
    path = os.path.join(workdir, name)
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, "__main__.py")):
        return {"kind": "script", "name": name}
    if not os.path.isfile(path):
        if "/" not in name and shutil.which(name):
            return {"kind": "program", "name": name}
        return {"kind": "missing", "name": path}
    if not os.access(path, os.R_OK):
        return {"kind": "unreadable", "name": path}
    with open(path, "rb") as file:
        first = file.readline(256)
    foreign = first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)
    if name.endswith(".py") or not foreign:
        return {"kind": "script", "name": name}
    if not os.access(path, os.X_OK):
        return {"kind": "not executable", "name": path}
    return {"kind": "program", "name": name if "/" in name else "./" + name}
