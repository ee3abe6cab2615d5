"""Reads the user's ssh_config for a node through `ssh -G`, so that every option in it counts."""

from __future__ import annotations

import functools
import getpass
import glob
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.common.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.head.nodes.node_list import Node
    from orchestrator.records.experiment import NodeRecord

    # A record with the host, user and port of a node.
    Login: TypeAlias = Node | NodeRecord
else:
    Login = object

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
MOST_HOPS = 8
# One machine of a ProxyJump: host, host:port, [v6] or [v6]:port.
HOP = re.compile(r"(?:\[(?P<v6>[^][]+)\]|(?P<host>[^][:]+))(?::(?P<port>[0-9]+))?")

# Keyword in lower case -> its values, as `ssh -G` prints them.
Settings = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Destination:
    """The address and options of one machine, with every default filled in."""

    # The name or address to connect to.
    host: str
    user: str
    port: int
    keys: tuple[Path, ...]
    # HostKeyAlias: the name under which known_hosts has the host key, without a port.
    alias: str = ""
    only_these_keys: bool = False
    jump: str = ""
    # The value of StrictHostKeyChecking.
    checking: str = "ask"
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    # The name as the node list has it.
    name: str = field(default="", compare=False)
    # The ControlMaster socket of the user's own ssh.
    control_path: str = ""
    settings: Settings = field(default_factory=dict, compare=False, repr=False)

    @property
    def listed_name(self) -> str:
        """Return the name that known_hosts lists it under; an alias stands for any port."""
        if self.alias or self.port == 22:
            return self.alias or self.host.lower()
        return f"[{self.host.lower()}]:{self.port}"

    @property
    def is_open(self) -> bool:
        """Return True if the user's own ssh holds a connection to it (ControlMaster).

        The socket must belong to the user or root: another user may listen in /tmp, and would
        receive the job.
        """
        if not self.control_path:
            return False
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                if os.lstat(self.control_path).st_uid not in (0, os.geteuid()):
                    return False
                sock.connect(self.control_path)
            except OSError:
                # No process listens, or the path is too long for ssh as well.
                return False
        return True


@dataclass(frozen=True)
class SshConfig:
    """The file of --ssh-config or, where `file` is None, the user's and the system's ssh_config."""

    file: Path | None = None

    def destination(
        self, host: str, user: str | None = None, port: int | None = None, jump: str = ""
    ) -> Destination:
        """Return the Destination for a host; a `jump` overrides the ProxyJump of the file."""
        if not _same_for_all(self.file):
            return _destination(host, user, port, ask_ssh(self.file, host, user, port, jump))
        # All threads share one call of `ssh -G`.
        with _asking:
            settings = _ask_once(self.file)
        own = {"hostname": (host,)} | ({"proxyjump": (jump,)} if jump else {})
        return _destination(host, user, port, settings and {**settings, **own})

    def of_node(self, node: Login) -> Destination:
        return self.destination(node.host, node.user, node.port)

    # There is one config for the life of a command.
    @functools.cache  # noqa: B019
    def last_hop(self, jump: str) -> Destination:
        """Return the last hop of a ProxyJump list; its own `jump` is the hops before it."""
        before, _, last = jump.rpartition(",")
        text = last.strip().removeprefix("ssh://")
        user, _, rest = text.rpartition("@")
        hop = HOP.fullmatch(rest)
        if hop is None:
            raise UsageError(f"ProxyJump {jump} of your ssh_config: {last!r} is not a host")
        host, port = hop["v6"] or hop["host"], hop["port"]
        return self.destination(host, user or None, int(port) if port else None, before)

    def defaults(self) -> Settings:
        """Return the defaults of ssh, which apply without a config file."""
        with _asking:
            return _ask_once(Path("none"))


_asking = threading.Lock()


@functools.cache
def _ask_once(file: Path | None) -> Settings:
    return ask_ssh(file, "any-host")


def ask_ssh(
    file: Path | None,
    host: str,
    user: str | None = None,
    port: int | None = None,
    jump: str = "",
) -> Settings:
    """Run `ssh -G` for one host and return its settings; {} if ssh is absent and not needed."""
    program = shutil.which("ssh")
    if program is None:
        if file is not None or (Path.home() / ".ssh/config").exists():
            raise UsageError(
                "the ssh program is needed to read your ssh_config and is not installed here",
                "install it (Debian, Ubuntu: apt-get install openssh-client)",
            )
        return {}
    # A Match block may depend on the user and the port.
    options = [("-F", file), ("-l", user), ("-p", port), ("-J", jump)]
    words = [word for name, value in options if value for word in (name, str(value))]
    command = [program, "-G", *words, "--", host]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if "jumphost loop" in done.stderr:
        raise loop_error(done.stderr.strip())
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if ": terminating, " not in line]
        unknown = "Bad configuration option" in done.stderr
        raise UsageError(
            f"ssh cannot read its configuration: {'; '.join(lines)}",
            "`IgnoreUnknown NAME` at its top passes over the option of another ssh" * unknown,
        )
    settings: dict[str, tuple[str, ...]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings[key.lower()] = (*settings.get(key.lower(), ()), value)
    return settings


def loop_error(jump: str) -> UsageError:
    """Return the error for a ProxyJump that leads back to the same machine."""
    return UsageError(
        f"the ProxyJump of your ssh_config leads back to the same machine ({jump})",
        "give the jump host a block of its own, with ProxyJump none, above that line",
    )


# Lines by which a host's settings may differ from those of others.
DEPENDS = re.compile(r"\s*(match|hostname|canonicalize|host[\s=]+(?!\*\s*$)|(?!#)[^#]*%)", re.I)
INCLUDE = re.compile(r"\s*include[\s=]+(.*)", re.I)


@functools.cache
def _same_for_all(file: Path | None) -> bool:
    """Return True if no line of the config depends on the host, so one `ssh -G` serves all hosts.

    `ssh -G` costs 4 ms; 64 of them would be a third of the time to connect to 64 nodes.
    """
    files = [file] if file else [Path.home() / ".ssh/config", SYSTEM_CONFIG]
    return not any(DEPENDS.match(line) for path in files for line in lines_of_config(path))


def lines_of_config(path: Path, depth: int = 8) -> Iterator[str]:
    """Yield the lines of a config file, with those of the files that it includes."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    base = SYSTEM_CONFIG.parent if path.is_relative_to("/etc/ssh") else Path.home() / ".ssh"
    for line in lines:
        yield line
        included = INCLUDE.match(line)
        if included and (not depth or re.search(r"""["'$\\]|~(?!/)""", included[1])):
            # The include is one that only ssh can expand: settings count as dependent on the host.
            yield "Match all"
        for word in included[1].split() if included else ():
            for found in glob.glob(str(base / Path(word).expanduser())):  # noqa: PTH207
                yield from lines_of_config(Path(found), depth - 1) if depth else ()


def _destination(host: str, user: str | None, port: int | None, settings: Settings) -> Destination:
    def first(key: str, default: str = "") -> str:
        value = settings.get(key, (default,))[0]
        return default if value == "none" else value

    def paths(key: str) -> tuple[Path, ...]:
        # Options of known hosts list several files, and `ssh -G` drops the quotes.
        several = key.endswith("knownhostsfile")
        words = [
            word
            for value in settings.get(key, ())
            for word in (re.split(r" (?=[/~%$])", value) if several else [value.strip('"')])
        ]
        return tuple(Path(word).expanduser() for word in words if word != "none")

    ssh = Path.home() / ".ssh"
    return Destination(
        host=first("hostname", host),
        user=user or first("user") or getpass.getuser(),
        port=port or int(first("port", "22")),
        alias=first("hostkeyalias").lower(),
        keys=paths("identityfile") or tuple(ssh / key for key in DEFAULT_KEYS),
        only_these_keys=first("identitiesonly") == "yes",
        jump=first("proxyjump"),
        checking=first("stricthostkeychecking", "ask"),
        user_known_hosts=paths("userknownhostsfile") if settings else (ssh / "known_hosts",),
        global_known_hosts=paths("globalknownhostsfile"),
        name=host,
        control_path=first("controlpath"),
        settings=settings,
    )
