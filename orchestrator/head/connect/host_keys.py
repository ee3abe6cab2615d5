"""Decide whether the machine that answers is the one that was known, as OpenSSH would.

An unknown host is recorded on first use (accept-new), a changed one is refused. One table is shared
by all connections of a launch: a file of a thousand lines is read once, not once per node.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import functools
import hashlib
import hmac
import ipaddress
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import tasks
from orchestrator.head.connect.ssh_config import Destination

# For `Match exec` in its own reader of ssh_config, paramiko imports invoke, and that asyncio, a
# YAML of its own and unittest.mock: 58 of 156 ms until the head is ready. We let `ssh -G` read it.
_invoke = sys.modules.get("invoke")
if _invoke is None:
    sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko as paramiko  # noqa: E402, PLC0414

if _invoke is None:
    del sys.modules["invoke"]
# It measures how long it waits by the clock of the day: one that is put back by an hour would make
# it wait for an hour, and one that is put on would end every wait at once.
_steady = SimpleNamespace(time=time.monotonic, sleep=tasks.sleep)
# What waits for one connection lets the others of its thread go on.
_waits = SimpleNamespace(
    Thread=threading.Thread,
    current_thread=threading.current_thread,
    Condition=tasks.Condition,
    Event=tasks.Event,
    Lock=tasks.Lock,
    RLock=tasks.Lock,
    Timer=tasks.Timer,
)
for _part in (
    *(paramiko.transport, paramiko.channel, paramiko.buffered_pipe, paramiko.packet),
    paramiko.auth_handler,
):
    _part.time, _part.threading = _steady, _waits  # type: ignore[attr-defined]

MOST_HASHED = 1000  # lines that are searched for each host, in 2 ms
COMMAND_SECONDS = 10.0  # a KnownHostsCommand asks a server, at most
CERTIFICATE = "-cert-v01@openssh.com"


@dataclass(frozen=True)
class KnownKey:
    patterns: str
    kind: str
    blob: bytes
    marker: str  # @revoked, @cert-authority or nothing
    where: str  # file:line

    def names(self, host: str) -> bool:
        """Tell whether the patterns name a host; a hashed name is none (see KnownHosts)."""
        named = False
        for pattern in self.patterns.split(","):
            if pattern.startswith("!"):
                if _matches(host, pattern[1:]):
                    return False
            else:
                named = named or _matches(host, pattern)
        return named


def _matches(host: str, pattern: str) -> bool:
    """Match a pattern of ssh's, which knows * and ?; fnmatch would read "[host]" as a set."""
    if "*" not in pattern and "?" not in pattern:
        return host == pattern.lower()
    return fnmatch.fnmatchcase(host, pattern.lower().replace("[", "[[]"))


def fingerprint(blob: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def listed_name(destination: Destination) -> str:
    """Return the name that known_hosts lists a host under; an alias stands for any port."""
    if destination.alias:
        return destination.alias
    return _with_port(destination.host, destination.port)


def _with_port(host: str, port: int) -> str:
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


class KnownHosts:
    """Lines so arranged that a host is found without a look at each of them."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: list[tuple[int, str, list[str]]] = []  # number, marker, fields
        self.by_name: dict[str, list[int]] = {}
        self.patterns: list[int] = []
        self.hashed: list[int] = []
        self.marked: list[int] = []  # of the hashed ones
        self.by_key: dict[str, list[int]] = {}  # of the hashed ones
        self.found: dict[str, tuple[KnownKey, ...]] = {}
        self.numbers = 0
        self.add(text)

    def add(self, text: str) -> None:
        for number, line in enumerate(text.splitlines(), self.numbers + 1):
            self.numbers = number
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#"):
                continue
            names, at = fields[0], len(self.lines)
            self.lines.append((number, marker, fields))
            if names.startswith("|"):
                self.hashed.append(at)
                self.by_key.setdefault(fields[2], []).append(at)
                if marker:
                    self.marked.append(at)
            elif set(names) & set("*?!"):
                self.patterns.append(at)
            else:
                for name in names.lower().split(","):
                    self.by_name.setdefault(name, []).append(at)

    def key(self, at: int) -> KnownKey | None:
        number, marker, (names, kind, blob, *_) = self.lines[at]
        try:
            where = f"{self.source}:{number}"
            return KnownKey(names, kind, base64.b64decode(blob), marker, where)
        except ValueError:
            return None

    def about(self, name: str) -> tuple[KnownKey, ...]:
        """Return the lines about a host, in order."""
        if name not in self.found:
            self.found[name] = self.at_hand(name, self.hashed)
        return self.found[name]

    def with_key(self, name: str, key: str) -> tuple[KnownKey, ...]:
        """Return the lines about a host, but of the hashed ones those with this key or a marker."""
        return self.at_hand(name, [*self.marked, *self.by_key.get(key, ())])

    def at_hand(self, name: str, hashed: Sequence[int]) -> tuple[KnownKey, ...]:
        """Return the lines about a host; of the hashed ones only these are looked at, 2 us each."""
        host = name.encode()
        keys = [(at, key) for at in self.patterns if (key := self.key(at)) and key.names(name)]
        at_once = self.by_name.get(name, [])
        about = {*at_once, *(at for at in hashed if _hashes(self.lines[at][2][0], host))}
        keys += [(at, key) for at in about if (key := self.key(at))]
        return tuple(key for _, key in sorted(keys, key=lambda pair: pair[0]))

    @functools.cached_property
    def usual_kinds(self) -> list[str]:
        """Return the kinds of the hashed lines, the most frequent first."""
        counted = Counter(self.lines[at][2][1] for at in self.hashed)
        return [kind for kind, _ in counted.most_common()]


def _hashes(pattern: str, host: bytes) -> bool:
    """Tell whether `|1|salt|digest`, as HashKnownHosts writes it, stands for a host."""
    try:
        _, kind, salt, digest = pattern.split("|")
        there = kind == "1" and hmac.digest(binascii.a2b_base64(salt), host, "sha1")
        return there == binascii.a2b_base64(digest)
    except ValueError:
        return False


class Files:
    """The files as they are now: each is read once in a state of it."""

    def __init__(self) -> None:
        self.read: dict[Path, tuple[tuple[int, ...], KnownHosts]] = {}
        self.reading = threading.Lock()  # by one for all: hundreds ask at the same moment

    def now(self, path: Path) -> KnownHosts:
        with self.reading:
            try:
                state = _state(path)
                if path not in self.read or self.read[path][0] != state:
                    text = path.read_text(errors="replace")
                    self.read[path] = state, KnownHosts(text, str(path))
                return self.read[path][1]
            except OSError:
                return KnownHosts("", str(path))

    def append(self, path: Path, line: bytes, name: str) -> None:
        """Add a line to a file, and to what was read of it."""
        with self.reading, path.open("a+b") as known:
            before = _state(path)
            known.seek(0, 2)
            if known.tell():
                known.seek(-1, 2)
                line = line if known.read(1) == b"\n" else b"\n" + line
            known.write(line)
            known.flush()
            after = _state(path)
            kept, hosts = self.read.get(path, ((), None))
            if hosts is not None and kept == before and after[0] == before[0] + len(line):
                hosts.add(line.decode().lstrip("\n"))
                hosts.found.pop(name, None)
                self.read[path] = after, hosts


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


FILES = Files()


def known_keys(
    destination: Destination, key: paramiko.PKey | None = None, name: str | None = None
) -> list[KnownKey]:
    """Return every line about this host, the user's files first.

    `key` is what the host has shown, if it has: a KnownHostsCommand may ask for it.
    """
    name = name or listed_name(destination)
    said = _run_command(destination, name, key)
    files = [*_files_of(destination), said]
    if key is not None:
        # Where a line has it, no other hashed one changes the verdict.
        lines = [line for file in files for line in file.with_key(name, key.get_base64())]
        if any(line.blob == key.asbytes() and not line.marker for line in lines):
            return lines
    return [line for file in files for line in file.about(name)]


def _files_of(destination: Destination) -> list[KnownHosts]:
    return [FILES.now(p) for p in destination.user_known_hosts + destination.global_known_hosts]


def _run_command(destination: Destination, name: str, key: paramiko.PKey | None) -> KnownHosts:
    """Run the user's KnownHostsCommand, which prints lines as known_hosts has them."""
    if not destination.known_hosts_command:
        return KnownHosts("", "")
    values = {"%": "%", "H": name, "I": "ORDER", "K": "NONE", "f": "NONE", "t": "NONE"}
    if key is not None:
        values |= {"I": "HOSTNAME", "K": key.get_base64(), "t": key.get_name()}
        values |= {"f": fingerprint(key.asbytes())}
    words = [
        re.sub("%(.)", lambda match: values[match[1]], word)
        for word in destination.known_hosts_command
    ]
    run = functools.partial(
        subprocess.run,
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_SECONDS,
        check=False,
    )
    try:
        done = tasks.aside(run, COMMAND_SECONDS)
    except (subprocess.TimeoutExpired, TimeoutError):
        raise NodeError(
            f"the KnownHostsCommand for it does not answer within {COMMAND_SECONDS:.0f} s",
            f"try it: {' '.join(words)}",
        ) from None
    except OSError:  # ssh, too, does without a program that it cannot start
        return KnownHosts("", "")
    if done.returncode != 0:
        raise NodeError(
            f"the KnownHostsCommand for it fails (exit code {done.returncode}: "
            f"{done.stderr.strip()[-300:]})",
            f"try it: {' '.join(words)}",
        )
    return KnownHosts(done.stdout, words[0])


def is_guessed(destination: Destination) -> bool:
    """Tell whether so many names are hashed that a host's kinds of key are not looked for."""
    return sum(len(file.hashed) for file in _files_of(destination)) > MOST_HASHED


def preferred_algorithms(
    destination: Destination, supported: Sequence[str], *, guess: bool = False
) -> tuple[str, ...]:
    """Order the kinds of host key to ask for as ssh does: first those that can be verified.

    A guess begins with the kinds that most hosts have.
    """
    wanted = destination.algorithms.host_keys or supported
    if guess:
        name, files = listed_name(destination), _files_of(destination)
        known = [line for file in files for line in file.with_key(name, "")]
        usual = [kind for file in files for kind in file.usual_kinds]
    else:
        known, usual = known_keys(destination), []
    kinds = {line.kind for line in known} or set(usual)
    authority = any(line.marker == "@cert-authority" for line in known)

    def rank(name: str) -> tuple[int, int]:
        if name.endswith(CERTIFICATE):
            return 0 if authority else 2, 0
        kind = re.sub("^rsa-sha2-.*", "ssh-rsa", name)
        return 0 if kind in kinds else 1, usual.index(kind) if kind in usual else 0

    return tuple(sorted((name for name in wanted if name in supported), key=rank))


# -- the verdict ------------------------------------------------------------------------------


class Guessed(NodeError):
    """The kind of key was guessed, and this host's line is not found by it."""


def check(
    destination: Destination,
    key: paramiko.PKey,
    *,
    strict: bool,
    address: str = "",
    guess: bool = False,
) -> None:
    """Return if the host may be trusted; a host seen for the first time is recorded.

    `address` is the IP address at the other end, "" behind a jump host or a ProxyCommand. After a
    guess the only verdict is that it may be trusted: all others are Guessed.
    """
    try:
        _check(destination, key, strict=strict, address=address, guess=guess)
    except NodeError as error:
        if guess:
            raise Guessed(error.what) from error
        raise


def _check(
    destination: Destination, key: paramiko.PKey, *, strict: bool, address: str, guess: bool
) -> None:
    local = bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if local and destination.trust_localhost and not destination.alias:
        return
    certificate, blob, name = Certificate.of_key(key), key.asbytes(), listed_name(destination)
    shown = f"{key.get_name()} {fingerprint(blob)}"
    if key.get_name() == "ssh-rsa" and key.get_bits() < destination.smallest_rsa:
        raise NodeError(f"its host key is shorter than RequiredRSASize allows: {shown}")
    if destination.revoked_keys:
        refuse_revoked(destination.revoked_keys, key, certificate, shown)
    known = known_keys(destination, key)
    revoked = _marked(known, "@revoked", blob, certificate)
    if revoked and not destination.lax:
        raise NodeError(f"its host key is revoked in {revoked}: {shown}", "do not connect to it")
    reason = ""
    if certificate and _marked(known, "@cert-authority", b"", certificate):
        known_as = destination.alias or destination.host.lower()
        reason = certificate_problem(certificate, known_as, destination.algorithms.authorities)
        if not reason:
            return
    plain = [line for line in known if not line.marker]
    if destination.lax and (plain or revoked):
        return  # whatever key it has: the user said so
    if destination.check_address and address and not local:
        _compare_address(destination, key, address, shown)
    if plain and all(line.blob != blob for line in plain):
        _refuse_changed(plain, key, name, shown)
    if plain or (not guess and _known_without_port(destination, key)):
        return
    if strict or destination.strict or guess:
        invalid = f"; its certificate {reason}" if reason else ""
        raise NodeError(f"its host key is not known ({shown}{invalid})", _how_to_add(destination))
    _record(destination, name, key)


def _marked(
    known: list[KnownKey], marker: str, blob: bytes, certificate: Certificate | None
) -> str:
    """Return the place of a line with this marker about a key, or about what certifies it."""
    blobs = {blob, certificate.authority if certificate else blob}
    lines = (line.where for line in known if line.marker == marker and line.blob in blobs)
    return next(lines, "")


def _refuse_changed(known: list[KnownKey], key: paramiko.PKey, name: str, shown: str) -> None:
    old = next((line for line in known if line.kind == key.get_name()), known[0])
    raise NodeError(
        f"its host key has changed: it shows {shown}, {old.where} says "
        f"{old.kind} {fingerprint(old.blob)}",
        f"if you know that it was reinstalled: ssh-keygen -R '{name}'"
        f" -f '{old.where.rpartition(':')[0]}'; if not, someone may be"
        " intercepting the connection",
    )


def _compare_address(
    destination: Destination, key: paramiko.PKey, address: str, shown: str
) -> None:
    """Refuse a key that differs from the known one of the address, where CheckHostIP asks."""
    listed = _with_port(address, destination.port)
    known = [line for line in known_keys(destination, key, listed) if not line.marker]
    if known and not destination.lax and all(line.blob != key.asbytes() for line in known):
        _refuse_changed(known, key, listed, shown)


def _known_without_port(destination: Destination, key: paramiko.PKey) -> bool:
    """Tell whether the name without the port has this key, which is enough for ssh."""
    if destination.alias or destination.port == 22:
        return False
    known = known_keys(destination, key, destination.host.lower())
    return any(not line.marker and line.blob == key.asbytes() for line in known)


def _how_to_add(destination: Destination) -> str:
    scan = f"ssh-keyscan -p {destination.port} {destination.host}"
    if destination.alias:
        scan += f" | sed 's/^[^ ]*/{destination.alias}/'"
    return f"compare the fingerprint, then: {scan} >> ~/.ssh/known_hosts"


def _record(destination: Destination, name: str, key: paramiko.PKey) -> None:
    if not destination.user_known_hosts:
        return
    file = destination.user_known_hosts[0]
    listed = paramiko.HostKeys.hash_host(name) if destination.hash_known_hosts else name
    line = f"{listed} {key.get_name()} {key.get_base64()}\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        FILES.append(file, line.encode(), name)
    except OSError as error:
        raise NodeError(
            f"its host key cannot be recorded in {file}: {error.strerror}",
            "make the file writable, or name another one with UserKnownHostsFile in ssh_config",
        ) from error


# -- certificates ----------------------------------------------------------------------------------
# As an SSH authority signs them for the machines of a site. paramiko checks that the host owns the
# key in its certificate, and nothing else. The format is that of PROTOCOL.certkeys in OpenSSH.

HOST_CERTIFICATE = 2  # the type of certificate that is not a user's
FIELDS_OF_KEY = {"ssh-rsa": 2, "ssh-ed25519": 1}  # and 2 for ecdsa-*: the curve and the point


@dataclass(frozen=True)
class Certificate:
    """The parts of a certificate that decide whether it counts."""

    blob: bytes
    kind: int
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    critical: bytes  # options that must be understood; there are none for hosts
    authority: bytes  # the public key that signed
    signed: bytes
    signature: bytes

    @staticmethod
    def of_key(key: paramiko.PKey) -> Certificate | None:
        """Return the certificate that came with a host's key, if one did."""
        public = getattr(key, "public_blob", None)
        if public is None:
            return None
        blob = bytes(public.key_blob)
        message = paramiko.Message(blob)
        for _ in range(2 + FIELDS_OF_KEY.get(key.get_name(), 2)):  # its type and a nonce first
            message.get_binary()
        message.get_int64()  # the serial number
        kind = message.get_int()
        message.get_binary()  # the name that the authority has for it
        listed = paramiko.Message(message.get_binary())
        principals = []
        while listed.get_remainder():
            principals.append(listed.get_binary().decode(errors="replace"))
        after, before = message.get_int64(), message.get_int64()
        critical, _, _ = (message.get_binary() for _ in range(3))
        authority = message.get_binary()
        signed = blob[: len(blob) - len(message.get_remainder())]
        signature = message.get_binary()
        return Certificate(
            *(blob, kind, tuple(principals), after, before, critical),
            *(authority, signed, signature),
        )


def certificate_problem(certificate: Certificate, host: str, algorithms: tuple[str, ...]) -> str:
    """Say why a certificate of a trusted authority does not count for this host, or nothing."""
    if certificate.kind != HOST_CERTIFICATE:
        return "is not one for hosts"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "is not valid at this time"
    if certificate.principals and not any(
        _is_for(host, pattern) for pattern in certificate.principals
    ):
        return f"is for {', '.join(certificate.principals)}"
    if certificate.critical:
        return "has an option that is not understood"
    algorithm = first_text(certificate.signature)
    if algorithms and algorithm not in algorithms:
        return f"is signed with {algorithm}"
    try:
        authority = paramiko.PKey.from_type_string(
            first_text(certificate.authority), certificate.authority
        )
        signature = paramiko.Message(certificate.signature)
        good = authority.verify_ssh_sig(certificate.signed, signature)
    except (paramiko.SSHException, ValueError) as error:
        return f"cannot be checked ({error})"
    return "" if good else "has a wrong signature"


def first_text(blob: bytes) -> str:
    """Return the name that a key, a certificate or a signature begins with."""
    return bytes(paramiko.Message(blob).get_binary()).decode(errors="replace")


def _is_for(host: str, pattern: str) -> bool:
    wild = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, host) is not None


# -- revoked keys ----------------------------------------------------------------------------------
# RevokedHostKeys names a list of keys, or ssh-keygen's KRL.

KRL = b"SSHKRL\n\0"


def refuse_revoked(
    file: Path, key: paramiko.PKey, certificate: Certificate | None, shown: str
) -> None:
    """Raise if the key, or what signed it, is revoked; like ssh, also if the file is not there."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NodeError(
            f"whether its host key is revoked cannot be seen: {file}: {error.strerror}",
            "without that file ssh trusts no host at all; make it, if need be an empty one",
        ) from error
    blobs = {key.asbytes()} | ({certificate.authority} if certificate else set())
    if content.startswith(KRL):
        revoked = _in_krl(file, key, certificate)
    else:
        revoked = any(blob in blobs for blob in _listed(content))
    if revoked:
        raise NodeError(f"its host key is revoked in {file}: {shown}", "do not connect to it")


def _listed(content: bytes) -> list[bytes]:
    blobs = []
    for line in content.splitlines():
        fields = line.split()
        if len(fields) >= 2 and not fields[0].startswith(b"#"):
            try:
                blobs.append(base64.b64decode(fields[1]))
            except ValueError:
                continue
    return blobs


def _in_krl(file: Path, key: paramiko.PKey, certificate: Certificate | None) -> bool:
    """Ask ssh-keygen, which alone reads its own format."""
    blob = certificate.blob if certificate else key.asbytes()
    line = f"{first_text(blob)} {base64.b64encode(blob).decode()}\n"
    with tempfile.NamedTemporaryFile(suffix=".pub") as public:
        public.write(line.encode())
        public.flush()
        try:
            done = subprocess.run(
                ["ssh-keygen", "-Q", "-f", str(file), public.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise NodeError(
                f"ssh-keygen is needed to read {file}: {error.strerror}",
                "install it (Debian, Ubuntu: apt-get install openssh-client)",
            ) from error
    if done.returncode not in (0, 1):
        raise NodeError(f"{file} cannot be read: {done.stderr.strip()}")
    return done.returncode == 1
