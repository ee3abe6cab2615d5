"""Reads the user's ssh_config for a node, through `ssh -G`, so that everything in it counts."""

from __future__ import annotations

import functools
import getpass
import glob
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator.errors import UsageError

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Destination:
    """The address and options of one machine, with every default filled in."""

    host: str  # the name or address to connect to
    user: str
    port: int
    known_as: str  # the name that known_hosts lists it under
    keys: tuple[Path, ...]
    certificates: tuple[Path, ...] = ()
    only_these_keys: bool = False
    agent: str = ""  # socket of an agent named in the config; "none" for no agent
    jump: str = ""
    proxy_command: str = ""
    bind_address: str = ""
    strict: bool = False
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    hash_known_hosts: bool = False


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


@dataclass(frozen=True)
class SshConfig:
    """The config file that is used: the one of --ssh-config, or the user's and the system's."""

    file: Path | None = None

    def destination(
        self, host: str, user: str | None = None, port: int | None = None
    ) -> Destination:
        if not _same_for_all(self.file):
            return _destination(host, user, port, ask(self.file, host, user, port))
        answers = _ask_once(self.file)
        destination = _destination(host, user, port, answers)
        return replace(destination, host=host, known_as=answers.get("hostkeyalias", [host])[0])

    def of_node(self, node: Login) -> Destination:
        return self.destination(node.host, node.user, node.port)


@functools.cache
def _ask_once(file: Path | None) -> dict[str, list[str]]:
    return ask(file, "any-host")


def ask(
    file: Path | None, host: str, user: str | None = None, port: int | None = None
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
    options = [("-F", file), ("-l", user), ("-p", port)]  # what a Match block may ask for
    given = [word for name, value in options if value for word in (name, str(value))]
    command = [program, "-G", *given, "--", host]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        raise UsageError(f"ssh cannot read its configuration: {done.stderr.strip()}")
    answers: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        answers.setdefault(key, []).append(value)
    return answers


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
    tokens = {"%": "%", "h": name, "n": host, "p": str(number), "r": login}
    tokens |= {"d": str(Path.home()), "u": getpass.getuser()}

    def paths(key: str) -> tuple[Path, ...]:
        values = [word for value in answers.get(key, []) for word in _words(key, value)]
        return tuple(Path(_expand(word, tokens)).expanduser() for word in values if word != "none")

    ssh = Path.home() / ".ssh"
    return Destination(
        host=name,
        user=login,
        port=number,
        known_as=first("hostkeyalias", name),
        keys=paths("identityfile") or tuple(ssh / key for key in DEFAULT_KEYS),
        certificates=paths("certificatefile"),
        only_these_keys=first("identitiesonly") == "yes",
        agent=answers.get("identityagent", [""])[0],
        jump=first("proxyjump"),
        proxy_command=_expand(first("proxycommand"), tokens),
        bind_address=first("bindaddress"),
        strict=first("stricthostkeychecking") in ("yes", "true"),
        user_known_hosts=paths("userknownhostsfile") if answers else (ssh / "known_hosts",),
        global_known_hosts=paths("globalknownhostsfile"),
        hash_known_hosts=first("hashknownhosts") == "yes",
    )


def _words(key: str, value: str) -> list[str]:
    """Split a value: known-hosts options list several files, and `ssh -G` drops the quotes."""
    return re.split(r" (?=[/~%])", value) if key.endswith("knownhostsfile") else [value.strip('"')]


def _expand(text: str, tokens: dict[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)
