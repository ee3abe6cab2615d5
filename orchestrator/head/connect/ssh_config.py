"""Reads the user's ssh_config for a node through `ssh -G`, so that every option in it counts."""

from __future__ import annotations

import functools
import getpass
import glob
import logging
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from orchestrator.common.errors import UsageError

log = logging.getLogger(__name__)

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

    host: str  # the name or address to connect to
    user: str
    port: int
    keys: tuple[Path, ...]
    alias: str = ""  # HostKeyAlias: the name of its host key, without a port
    only_these_keys: bool = False
    family: str = "any"  # AddressFamily: any, inet or inet6
    jump: str = ""
    bind_address: str = ""
    checking: str = "ask"  # StrictHostKeyChecking
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    hash_known_hosts: bool = False
    smallest_rsa: int = 0  # bits
    name: str = field(default="", compare=False)  # as it is written in the node list
    control_path: str = ""  # the socket of the user's own ssh
    settings: Settings = field(default_factory=dict, compare=False, repr=False)

    @property
    def strict(self) -> bool:
        """Return True if an unknown host is refused."""
        return self.checking in ("yes", "true")

    @property
    def listed_name(self) -> str:
        """Return the name that known_hosts lists it under; an alias stands for any port."""
        if self.alias or self.port == 22:
            return self.alias or self.host.lower()
        return f"[{self.host.lower()}]:{self.port}"

    @property
    def is_open(self) -> bool:
        """Return True if the user's own ssh holds a connection to it (ControlMaster).

        The socket must be the user's: others may listen in /tmp, and would be given what a job is.
        """
        if not self.control_path:
            return False
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                if os.lstat(self.control_path).st_uid not in (0, os.geteuid()):
                    return False
                sock.connect(self.control_path)
            except OSError:  # no process listens, or the path is too long for ssh as well
                return False
        return True


class Login(Protocol):
    """The part of a node, or of its record, by which it is reached."""

    @property
    def host(self) -> str: ...

    @property
    def user(self) -> str | None: ...

    @property
    def port(self) -> int | None: ...

    @property
    def python(self) -> str | None: ...

    @property
    def activate(self) -> str | None: ...

    @property
    def wrap(self) -> str | None: ...


@dataclass(frozen=True)
class SshConfig:
    """The config file that is used: the one of --ssh-config, or the user's and the system's."""

    file: Path | None = None

    def destination(
        self, host: str, user: str | None = None, port: int | None = None, jump: str = ""
    ) -> Destination:
        """Return how a host is reached; `jump` is a ProxyJump that wins over that of the file."""
        if not _same_for_all(self.file):
            return _destination(host, user, port, ask(self.file, host, user, port, jump))
        with _asking:  # One question for all threads.
            common = _common(self.file, user, port)
        return replace(common, host=host, name=host, jump=jump or common.jump)

    def of_node(self, node: Login) -> Destination:
        return self.destination(node.host, node.user, node.port)

    def last_hop(self, jump: str) -> Destination:
        """Return the last machine of `user@host:port,...`, reached through those before it."""
        return _last_hop(self, jump)

    def defaults(self) -> Settings:
        """Return the settings of ssh without any file."""
        return _ask_once(Path("none"))


_asking = threading.Lock()


def read_again() -> None:
    """Forget what the files said, for a process that outlives an edit of them."""
    for remembered in (_common, _ask_once, _same_for_all, _last_hop):
        remembered.cache_clear()


@functools.cache
def _last_hop(config: SshConfig, jump: str) -> Destination:
    before, _, last = jump.rpartition(",")
    text = last.strip().removeprefix("ssh://")
    user, _, rest = text.rpartition("@")
    hop = HOP.fullmatch(rest)
    if hop is None:
        raise UsageError(f"ProxyJump {jump} of your ssh_config: {last!r} is not a host")
    host, port = hop["v6"] or hop["host"], hop["port"]
    return config.destination(host, user or None, int(port) if port else None, before)


@functools.cache
def _common(file: Path | None, user: str | None, port: int | None) -> Destination:
    """Return what is the same for all hosts, where no line of the config depends on them."""
    return _destination("any-host", user, port, _ask_once(file))


@functools.cache
def _ask_once(file: Path | None) -> Settings:
    return ask(file, "any-host")


def ask(
    file: Path | None,
    host: str,
    user: str | None = None,
    port: int | None = None,
    jump: str = "",
) -> Settings:
    """Run `ssh -G` for one host."""
    program = shutil.which("ssh")
    if program is None:
        if file is not None or (Path.home() / ".ssh/config").exists():
            raise UsageError(
                "the ssh program is needed to read your ssh_config and is not installed here",
                "install it (Debian, Ubuntu: apt-get install openssh-client)",
            )
        return {}
    # The user and the port are what a Match block may ask for.
    options = [("-F", file), ("-l", user), ("-p", port), ("-J", jump)]
    words = [word for name, value in options if value for word in (name, str(value))]
    command = [program, "-G", *words, "--", host]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if "jumphost loop" in done.stderr:
        raise loop(done.stderr.strip())
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if ": terminating, " not in line]
        unknown = "Bad configuration option" in done.stderr
        raise UsageError(
            f"ssh cannot read its configuration: {'; '.join(lines)}",
            "`IgnoreUnknown NAME` at its top passes over the option of another ssh" * unknown,
        )
    log.debug("asked ssh -G for %s", host)
    settings: dict[str, tuple[str, ...]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        settings[key.lower()] = (*settings.get(key.lower(), ()), value)
    return settings


def loop(jump: str) -> UsageError:
    """Return the error for a machine that would be reached through itself."""
    return UsageError(
        f"the ProxyJump of your ssh_config leads back to the same machine ({jump})",
        "give the jump host a block of its own, with ProxyJump none, above that line",
    )


@functools.cache
def _same_for_all(file: Path | None) -> bool:
    """Return True if no line of the config depends on the host: one question answers for all.

    `ssh -G` costs 4 ms; 64 of them would be a third of the time to connect to 64 nodes.
    """
    files = [file] if file else [Path.home() / ".ssh/config", SYSTEM_CONFIG]
    return not any(_depends_on_host(path, 0) for path in files)


def _depends_on_host(path: Path, depth: int) -> bool:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        parts = re.split(r"[\s=]+", line.strip(), maxsplit=1)
        keyword, rest = parts[0].lower(), parts[1] if len(parts) > 1 else ""
        if keyword in ("match", "hostname", "canonicalizehostname"):
            return True
        if (keyword == "host" and rest.strip() != "*") or ("%" in rest and keyword[:1] != "#"):
            return True
        if keyword == "include" and (depth > 8 or _includes_depend(rest, path, depth)):
            return True
    return False


def _includes_depend(rest: str, path: Path, depth: int) -> bool:
    if re.search(r"""["'$\\]|~(?!/)""", rest):
        return True  # Quotes and variables are for ssh to read.
    base = SYSTEM_CONFIG.parent if path.is_relative_to("/etc/ssh") else Path.home() / ".ssh"
    patterns = [base / Path(word).expanduser() for word in rest.split()]
    return any(
        _depends_on_host(Path(included), depth + 1)
        for pattern in patterns
        for included in glob.glob(str(pattern))  # noqa: PTH207  the pattern is absolute
    )


def _destination(host: str, user: str | None, port: int | None, settings: Settings) -> Destination:
    def first(key: str, default: str = "") -> str:
        value = settings.get(key, (default,))[0]
        return default if value == "none" else value

    name = first("hostname", host)
    login = user or first("user") or getpass.getuser()
    number = port or int(first("port", "22"))
    tokens = {"%": "%", "d": str(Path.home()), "u": getpass.getuser(), "i": str(os.getuid())}
    tokens |= {"h": name, "n": host, "p": str(number), "r": login}

    def paths(key: str) -> tuple[Path, ...]:
        values = [word for value in settings.get(key, ()) for word in _words(key, value)]
        words = [_expand(key, word, tokens) for word in values if word != "none"]
        return tuple(Path(word).expanduser() for word in words)

    ssh = Path.home() / ".ssh"
    return Destination(
        host=name,
        user=login,
        port=number,
        alias=first("hostkeyalias").lower(),
        keys=paths("identityfile") or tuple(ssh / key for key in DEFAULT_KEYS),
        only_these_keys=first("identitiesonly") == "yes",
        family=first("addressfamily", "any"),
        jump=_expand("proxyjump", first("proxyjump"), tokens),
        bind_address=first("bindaddress"),
        checking=first("stricthostkeychecking", "ask"),
        user_known_hosts=paths("userknownhostsfile") if settings else (ssh / "known_hosts",),
        global_known_hosts=paths("globalknownhostsfile"),
        hash_known_hosts=first("hashknownhosts") == "yes",
        smallest_rsa=int(first("requiredrsasize", "0")),
        name=host,
        control_path=first("controlpath"),
        settings=settings,
    )


def _words(key: str, value: str) -> list[str]:
    """Split a value: known-hosts options list several files, and `ssh -G` drops the quotes."""
    return re.split(r" (?=[/~%$])", value) if key.endswith("knownhostsfile") else [value.strip('"')]


def _expand(key: str, text: str, tokens: Mapping[str, str]) -> str:
    """Fill in ssh's tokens and ${VARIABLES}; raise for one that is not known here."""

    def value(match: re.Match[str]) -> str:
        name, known = (match[1], tokens) if match[1] else (match[2], os.environ)
        if name not in known:
            raise UsageError(
                f"{match[0]} in the {key} of your ssh_config ({text}) is not "
                + ("understood here" if match[1] else "set here"),
                "write out what it stands for",
            )
        return known[name]

    return re.sub(r"%(.)|\$\{(\w+)\}", value, text)
