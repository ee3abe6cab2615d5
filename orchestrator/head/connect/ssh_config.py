"""Reads the user's ssh_config for a node, through `ssh -G`, so that everything in it counts."""

from __future__ import annotations

import functools
import getpass
import glob
import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from orchestrator.common.errors import NodeError, UsageError

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
MOST_HOPS = 8
# One machine of a ProxyJump: host, host:port, [v6] or [v6]:port.
HOP = re.compile(r"(?:\[(?P<v6>[^][]+)\]|(?P<host>[^][:]+))(?::(?P<port>[0-9]+))?")


@dataclass(frozen=True)
class Algorithms:
    """The algorithms that may be negotiated, best first; none where there is no ssh to ask."""

    host_keys: tuple[str, ...] = ()
    authorities: tuple[str, ...] = ()  # by which the authority of a host certificate may sign
    kex: tuple[str, ...] = ()
    ciphers: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()


class OnlySsh(NodeError):
    """Raised for what ssh itself can do and paramiko cannot."""


_asking = threading.Lock()
ONLY_SSH = (("proxyusefdpass", "ProxyUseFdpass"),)
OTHER_LOGINS = (
    ("gssapiauthentication", "GSSAPIAuthentication"),
    ("hostbasedauthentication", "HostbasedAuthentication"),
    ("pkcs11provider", "PKCS11Provider"),
)
NEGOTIATED = ("hostkeyalgorithms", "casignaturealgorithms", "kexalgorithms", "ciphers", "macs")


@dataclass(frozen=True)
class Destination:
    """The address and options of one machine, with every default filled in."""

    host: str  # the name or address to connect to
    user: str
    port: int
    keys: tuple[Path, ...]
    alias: str = ""  # HostKeyAlias: the name of its host key, without any port
    certificates: tuple[Path, ...] = ()
    only_these_keys: bool = False
    agent: str = ""  # socket of an agent named in the config; "none" for no agent
    family: str = "any"  # AddressFamily: any, inet or inet6
    jump: str = ""
    proxy_command: str = ""
    bind_address: str = ""
    strict: bool = False  # StrictHostKeyChecking yes: an unknown host is refused, too
    lax: bool = False  # StrictHostKeyChecking no: not even a changed key is refused
    trust_localhost: bool = False  # NoHostAuthenticationForLocalhost
    check_address: bool = False  # CheckHostIP
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    hash_known_hosts: bool = False
    known_hosts_command: tuple[str, ...] = ()  # its words; %H, %I, %K, %f and %t are still there
    revoked_keys: Path | None = None
    smallest_rsa: int = 0  # bits
    algorithms: Algorithms = Algorithms()
    name: str = field(default="", compare=False)  # as it is written in the node list
    control_path: str = ""  # the socket where the user's own ssh is asked for sessions
    only_ssh: tuple[str, ...] = ()  # the options by which only ssh connects,
    other_logins: tuple[str, ...] = ()  # or logs in

    @property
    def is_open(self) -> bool:
        """Tell whether the user's own ssh holds a connection to it.

        Anybody may listen in /tmp, and would be given all that a job is given.
        """
        if not self.control_path:
            return False
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                if os.lstat(self.control_path).st_uid not in (0, os.geteuid()):
                    return False
                sock.connect(self.control_path)
            except OSError:  # nobody listens, or a path too long for ssh, too
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
        """Ask how a host is reached; `jump` is a ProxyJump that wins over that of the file."""
        if not _same_for_all(self.file):
            return _destination(host, user, port, ask(self.file, host, user, port, jump))
        with _asking:  # else 64 threads ask before the first has an answer
            common = _common(self.file, user, port)
        return replace(common, host=host, name=host, jump=jump or common.jump)

    def of_node(self, node: Login) -> Destination:
        return self.destination(node.host, node.user, node.port)

    def last_hop(self, jump: str) -> Destination:
        """Return the last machine of `user@host:port,...`, reached through those before it."""
        return _last_hop(self, jump)

    def way(self, destination: Destination) -> list[Destination] | None:
        """Return a machine and the jump hosts before it, the nearest first; None: too many."""
        hops = [destination]
        while hops[-1].jump:
            if len(hops) > MOST_HOPS:
                return None
            hops.append(self.last_hop(hops[-1].jump))
        return hops

    def is_open(self, destination: Destination) -> bool:
        """Tell whether the user's own ssh is logged in there, or at a jump host before it."""
        return any(hop.is_open for hop in self.way(destination) or ())

    def route_to(self, destination: Destination) -> Route | None:
        """Resolve the way to a machine; None for one whose connections cannot be held.

        A ProxyCommand with variables leads wherever the environment of each command says.
        """
        hops = self.way(destination)
        if hops is None or any("$" in hop.proxy_command for hop in hops):
            return None
        return Route(tuple(hops), tuple(_identities(hops)))


@dataclass(frozen=True)
class Route:
    """A machine and the jump hosts before it, the nearest to the machine first."""

    hops: tuple[Destination, ...]
    identities: tuple[tuple[str, int, int, int], ...] = ()  # key files, as they are now

    @property
    def destination(self) -> Destination:
        return self.hops[0]

    @property
    def key(self) -> str:
        """Return what is equal only for two routes that differ in nothing.

        A dataclass shows all its fields, and ten times as fast as asdict() copies them.
        """
        return hashlib.sha256(repr(self).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class KnownHops(SshConfig):
    """An ssh_config of which nothing is asked but the jump hosts of one route."""

    hops: tuple[Destination, ...] = ()

    def last_hop(self, jump: str) -> Destination:
        return next(after for hop, after in pairwise(self.hops) if hop.jump == jump)


def _identities(hops: list[Destination]) -> Iterator[tuple[str, int, int, int]]:
    for path in dict.fromkeys(
        path
        for hop in hops
        for key in hop.keys
        for path in (key, key.with_name(key.name + "-cert.pub"), *hop.certificates)
    ):
        try:
            status = path.stat()
        except OSError:
            continue
        yield str(path), status.st_mtime_ns, status.st_size, status.st_ino


def read_again() -> None:
    """Forget what the files said: a process that lives long meets them changed."""
    for remembered in (_common, _ask_once, _same_for_all, _last_hop):
        remembered.cache_clear()


@functools.cache  # for all nodes behind it
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
def _ask_once(file: Path | None) -> dict[str, list[str]]:
    return ask(file, "any-host")


def ask(
    file: Path | None,
    host: str,
    user: str | None = None,
    port: int | None = None,
    jump: str = "",
) -> dict[str, list[str]]:
    """Run `ssh -G` for one host, and return keyword -> values."""
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
    answers: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        answers.setdefault(key, []).append(value)
    return answers


def loop(jump: str) -> UsageError:
    """Return the error for a machine that would be reached through itself."""
    return UsageError(
        f"the ProxyJump of your ssh_config leads back to the same machine ({jump})",
        "give the jump host a block of its own, with ProxyJump none, above that line",
    )


@functools.cache
def _same_for_all(file: Path | None) -> bool:
    """Tell whether no line of the config depends on the host: one question then answers for all.

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
        return True  # more than is understood here
    base = SYSTEM_CONFIG.parent if path.is_relative_to("/etc/ssh") else Path.home() / ".ssh"
    patterns = [base / Path(word).expanduser() for word in rest.split()]
    return any(
        _depends_on_host(Path(included), depth + 1)
        for pattern in patterns
        for included in glob.glob(str(pattern))  # noqa: PTH207  the pattern is absolute
    )


def _destination(
    host: str, user: str | None, port: int | None, answers: dict[str, list[str]]
) -> Destination:
    def first(key: str, default: str = "") -> str:
        value = answers.get(key, [default])[0]
        return default if value == "none" else value

    name = first("hostname", host)
    login = user or first("user") or getpass.getuser()
    number = port or int(first("port", "22"))
    alias = first("hostkeyalias").lower()
    tokens = _about_here() | {"h": name, "n": host, "p": str(number), "r": login}
    tokens["k"] = alias or host

    def paths(key: str) -> tuple[Path, ...]:
        values = [word for value in answers.get(key, []) for word in _words(key, value)]
        words = [_expand(key, word, tokens) for word in values if word != "none"]
        return tuple(Path(word).expanduser() for word in words)

    ssh = Path.home() / ".ssh"
    strictness = first("stricthostkeychecking")
    return Destination(
        host=name,
        user=login,
        port=number,
        alias=alias,
        keys=paths("identityfile") or tuple(ssh / key for key in DEFAULT_KEYS),
        certificates=paths("certificatefile"),
        only_these_keys=first("identitiesonly") == "yes",
        agent=_agent(answers.get("identityagent", [""])[0], tokens),
        family=first("addressfamily", "any"),
        jump=_expand("proxyjump", first("proxyjump"), tokens),
        proxy_command=_expand("proxycommand", first("proxycommand"), tokens),
        bind_address=first("bindaddress"),
        strict=strictness in ("yes", "true"),
        lax=strictness in ("no", "false", "off"),
        trust_localhost=first("nohostauthenticationforlocalhost") == "yes",
        check_address=first("checkhostip") == "yes",
        user_known_hosts=paths("userknownhostsfile") if answers else (ssh / "known_hosts",),
        global_known_hosts=paths("globalknownhostsfile"),
        hash_known_hosts=first("hashknownhosts") == "yes",
        known_hosts_command=_command(first("knownhostscommand"), tokens),
        revoked_keys=next(iter(paths("revokedhostkeys")), None),
        smallest_rsa=int(first("requiredrsasize", "0")),
        algorithms=Algorithms(*(tuple(filter(None, first(key).split(","))) for key in NEGOTIATED)),
        name=host,
        control_path=first("controlpath"),
        only_ssh=tuple(word for key, word in ONLY_SSH if first(key) == "yes"),
        other_logins=tuple(word for key, word in OTHER_LOGINS if first(key, "no") != "no"),
    )


def _agent(value: str, tokens: dict[str, str]) -> str:
    """Return the socket of an IdentityAgent; nothing for that of the environment."""
    value = value.strip('"')
    if value in ("", "none", "SSH_AUTH_SOCK"):
        return value if value == "none" else ""
    if re.fullmatch(r"\$\w+", value):
        return os.environ.get(value[1:]) or "none"
    return str(Path(_expand("identityagent", value, tokens)).expanduser())


def _about_here() -> dict[str, str]:
    """Return the tokens of ssh_config that do not depend on the host."""
    name = socket.gethostname()
    here = {"%": "%", "d": str(Path.home()), "u": getpass.getuser(), "i": str(os.getuid())}
    return here | {"l": name, "L": name.partition(".")[0]}


def _words(key: str, value: str) -> list[str]:
    """Split a value: known-hosts options list several files, and `ssh -G` drops the quotes."""
    return re.split(r" (?=[/~%$])", value) if key.endswith("knownhostsfile") else [value.strip('"')]


def _command(command: str, tokens: dict[str, str]) -> tuple[str, ...]:
    """Split a KnownHostsCommand; what stands for the key is filled in where there is a key."""
    later = {name: f"%{name}" for name in "HIKft%"}
    values = {name: value.replace("%", "%%") for name, value in tokens.items()} | later
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"KnownHostsCommand {command}: {error}") from None
    return tuple(_expand("knownhostscommand", word, values) for word in words)


def _expand(key: str, text: str, tokens: dict[str, str]) -> str:
    """Fill in ssh's tokens and ${VARIABLES}, or refuse what cannot be: a wrong name is worse."""

    def value(match: re.Match[str]) -> str:
        name, known = (match[1], tokens) if match[1] else (match[2], os.environ)
        if name not in known:
            raise UsageError(
                f"{match[0]} in the {key} of your ssh_config ({text}) is not "
                + ("understood here" if match[1] else "set here"),
                "write out what it stands for",
            )
        return known[name]

    if key.startswith("proxy"):  # a shell reads the variables of this one
        return re.sub(r"%(.)()", value, text)
    return re.sub(r"%(.)|\$\{(\w+)\}", value, text)
