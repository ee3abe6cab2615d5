"""Names the files of a job on a node: ~/.orchestrator/runs/JOB/PART/, 0700, and ATTEMPT/ below it.

The supervisor writes the files, the server reads them, and they outlive both. PART is the number of
the node's part of the job: nodes may share a home directory. It stays the same in all attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from orchestrator.common import files
from orchestrator.protocol import events
from orchestrator.protocol.events import Event
from orchestrator.protocol.message import Nonsense, decode_value, parse_object, to_json
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.version import OWN, Version

E = TypeVar("E", bound=Event)
# The socket of a supervisor, or of a standby.
SOCKET = "socket"
JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=,-]{0,199}")


class PartDir:
    """The files of a node's part of a job that all attempts share."""

    def __init__(self, job: str, part: int) -> None:
        # The values may come from a file of another user.
        if not JOB_NAME.fullmatch(job) or part < 0:
            raise ValueError(f"not a job and its part: {job!r}, {part!r}")
        self.job, self.part = job, part
        self.home = os.path.join(files.our_directory(), "runs", job, str(part))
        # As the head sent it: each attempt begins with it.
        self.spec = os.path.join(self.home, "spec.json")
        self.payload = os.path.join(self.home, "payload")
        # The experiment's directory, if the node does not share the head's disk.
        self.experiment = os.path.join(self.home, "experiment")
        # Exists once no later attempt of the job may start.
        self.over = f"{self.home}.over"

    def write_spec(self, spec: Spec) -> None:
        write_private(self.spec, to_json(spec))

    def read_spec(self) -> Spec:
        """Return the spec, written by any version of this package."""
        with open(self.spec, "rb") as file:
            return decode_value(Spec, parse_object(file.read()), newer=True)

    def version(self) -> Version:
        """Return the supervisor's version, from the one key of spec.json that all versions have.

        Earlier versions had no directory for each attempt.
        """
        for path in (self.spec, os.path.join(self.home, "spec.json")):
            with contextlib.suppress(OSError, Nonsense), open(path, "rb") as file:
                data = parse_object(file.read()).get("version", {})
                return decode_value(Version, data, newer=True)
        return OWN

    def attempts(self) -> list[RunDir]:
        """Return the attempts that have a directory here."""
        numbers = sorted(int(name) for name in names_in(self.home) if name.isdigit())
        return [RunDir(self.job, self.part, number) for number in numbers]


class RunDir(PartDir):
    """The files of one attempt on one node."""

    def __init__(self, job: str, part: int, attempt: int = 1) -> None:
        super().__init__(job, part)
        self.attempt = attempt
        self.path = os.path.join(self.home, str(attempt))
        self.spec = os.path.join(self.path, "spec.json")
        self.log = os.path.join(self.path, "log")
        self.ranks = os.path.join(self.path, "ranks")
        self.events = os.path.join(self.path, "events.jsonl")
        # The supervisor's own log, for people.
        self.system = os.path.join(self.path, "supervisor.log")
        self.socket = os.path.join(self.path, SOCKET)
        self.reports = os.path.join(self.path, "reports")
        # Only the time of this file is used.
        self.torch_ready = os.path.join(self.path, "torch_ready")
        # Exists once the end was requested.
        self.ending = os.path.join(self.path, "ending")
        # Exists once this attempt must not start here any more.
        self.stopped = f"{self.path}.stopped"

    @property
    def words(self) -> list[str]:
        """Return the arguments by which a process of this attempt names it."""
        return [self.job, str(self.part), str(self.attempt)]

    def create(self) -> None:
        os.makedirs(self.home, mode=0o700, exist_ok=True)
        os.mkdir(self.path, 0o700)

    def forbid_start(self, *, for_good: bool = False) -> None:
        """Create a mark that forbids every server to start this attempt here, or any later one.

        A stop writes the mark and then looks for the job; a start becomes visible and then looks
        for the mark. So one of them sees the other, in any order.
        """
        os.makedirs(self.home, mode=0o700, exist_ok=True)
        for path in (self.stopped, self.over)[: 1 + for_good]:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))

    @property
    def start_is_forbidden(self) -> bool:
        return any(map(os.path.lexists, (self.stopped, self.over)))

    def fifo(self, local_rank: int) -> str:
        return os.path.join(self.path, f"out_{local_rank}")

    def error(self, local_rank: int) -> str:
        return os.path.join(self.path, f"error_{local_rank}.json")

    def append_event(self, event: Event) -> None:
        """Add an event in place of a supervisor that is gone, on a line of its own."""
        with open(self.events, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            # The supervisor may have written half a line.
            rest = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(rest + json.dumps(events.event_to_data(event)).encode("ascii") + b"\n")

    def read_events(self) -> Iterator[Event]:
        try:
            with open(self.events, "rb") as file:
                lines = file.readlines()
        except FileNotFoundError:
            return
        for line in lines:
            # The last line may be incomplete; after a power failure there may be garbage.
            with contextlib.suppress(Nonsense):
                yield events.event_from_data(parse_object(line))

    def last(self, kind: type[E]) -> E | None:
        """Return the last event of this kind, or None."""
        newest = None
        for event in self.read_events():
            if isinstance(event, kind):
                newest = event
        return newest


def write_private(path: str, text: str) -> None:
    """Write a new file that its owner alone can read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with files.path_in_errors(path), open(fd, "w", encoding="utf-8") as file:
        file.write(text)


# An older log of the same size stays in server-HOST.log.1.
LARGEST_SERVER_LOG_BYTES = 1 << 20
MOST_TOLD_BYTES = 1 << 18
SYSTEM_TIME = "%Y-%m-%d %H:%M:%S"


def server_log() -> str:
    """Return the path of the servers' log: machines that share a home have a file each."""
    return os.path.join(files.our_directory(), f"server-{socket.gethostname()}.log")


class SystemLog:
    """The log of a supervisor or a server, for its owner alone.

    Several processes may append: each line is one write. If a write fails, the
    job goes on without it. `logging` is not used, as it would add 10 ms to each start.
    """

    def __init__(self, path: str, largest: int = 0, secrets: Sequence[str] = ()) -> None:
        self.file: int | None = None
        self.secrets = secrets
        with contextlib.suppress(OSError):
            self.file = files.open_to_append(path)
            if largest and os.fstat(self.file).st_size > largest:
                os.replace(path, f"{path}.1")
                os.close(self.file)
                self.file = files.open_to_append(path)

    def line(self, text: str, *values: object) -> None:
        """Write a line: the time, the PID, and the text."""
        now = time.time()
        at = f"{time.strftime(SYSTEM_TIME, time.localtime(now))}.{int(now % 1 * 1000):03d}"
        words = text % values
        if self.secrets:
            # Imported here as a server has no secrets.
            from orchestrator.common import hiding

            words = hiding.hide_secrets(words, self.secrets)
        if self.file is not None:
            with contextlib.suppress(OSError):
                files.append_lines(
                    self.file, f"{at} [{os.getpid()}] {words}\n".encode(errors="replace")
                )


def lines_between(paths: Sequence[str], since: float, until: float) -> str:
    """Return the lines of these files between two times, the newest if there are many."""
    first, last = (time.strftime(SYSTEM_TIME, time.localtime(at)) for at in (since, until + 1))
    found = b""
    for path in paths:
        with contextlib.suppress(OSError), files.open_plain(path) as file:
            for line in file:
                if first <= line[: len(first)].decode("ascii", "replace") <= last:
                    found += line
    return found[-MOST_TOLD_BYTES:].decode("utf-8", "replace")


def stop_of_all() -> str:
    """Return the identifier of the last stop of all jobs here; each stop has another one."""
    try:
        with open(_stop_of_all(), encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def note_stop_of_all() -> None:
    """Create a mark that forbids the start of every job whose head is already connected."""
    os.makedirs(os.path.dirname(_stop_of_all()), mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(_stop_of_all(), flags, 0o600), "w", encoding="ascii") as file:
        file.write(os.urandom(8).hex())


def _stop_of_all() -> str:
    """Return the file of the identifier: machines that share a home each have their own."""
    return os.path.join(
        files.our_directory(), "runs", f".stopped-{zlib.crc32(os.fsencode(machine_name())):08x}"
    )


def machine_name() -> str:
    """Return this machine's name, the same after a reboot: machines may share a home."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read(64).strip()}"
    except (OSError, ValueError):
        return socket.gethostname()


def runs_here() -> str:
    """Return an identifier of this user's directory for jobs here, the same after a reboot."""
    return f"{os.getuid()} {files.our_directory()} {zlib.crc32(os.fsencode(machine_name())):08x}"


def all_runs() -> Iterator[RunDir]:
    """Yield the last attempt of every part of a job on this machine."""
    runs = os.path.join(files.our_directory(), "runs")
    for job in filter(JOB_NAME.fullmatch, names_in(runs)):
        parts = (int(name) for name in names_in(os.path.join(runs, job)) if name.isdigit())
        for part in sorted(parts):
            yield from PartDir(job, part).attempts()[-1:]


def names_in(directory: str) -> list[str]:
    """Return the sorted names in a directory; none if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def connect_supervisor(run: RunDir) -> socket.socket:
    """Connect to the run's supervisor."""
    return connect_in(run.path)


def connect_in(path: str, seconds: float = 5.0) -> socket.socket:
    """Connect to a socket in a directory, by a path that fits into a socket's address."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(seconds)
        client.connect(f"/proc/self/fd/{directory}/{SOCKET}")
    except OSError:
        client.close()
        raise
    finally:
        os.close(directory)
    return client


def listen_in(path: str) -> socket.socket:
    """Listen at a socket in a directory, by a short enough name; only this user may connect."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    server = socket.socket(socket.AF_UNIX)
    try:
        with files.path_in_errors(os.path.join(path, SOCKET)):
            server.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        os.chmod(os.path.join(path, SOCKET), 0o600)
        server.listen()
    except OSError:
        server.close()
        raise
    finally:
        os.close(directory)
    return server
