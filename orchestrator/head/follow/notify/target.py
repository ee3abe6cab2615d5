"""Read what --notify names, and the file that keeps it for later heads.

An address that posts into somebody's channel is a secret, and so may a command be. Records show
only what `shown` gives; the file is for its owner alone, and counts only if nobody else wrote it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.records.experiment import NOTIFY, Experiment

LARGEST_BYTES = 1 << 20
HIDDEN = "(redacted)"
FIX = "write cmd:COMMAND, webhook:URL, webhook:env:NAME, webhook:file:PATH or mail:ADDRESS"
ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PROGRAM = re.compile(r"[A-Za-z0-9_./~+-]+")


@dataclass(frozen=True)
class Target:
    """One that is told."""

    kind: str  # cmd, webhook or mail
    written: str  # as the user wrote it
    to: str  # the command, the URL or the address

    @property
    def shown(self) -> str:
        """Name it without what may be a secret."""
        if self.kind == "mail" or self.written.startswith(("webhook:env:", "webhook:file:")):
            return self.written
        if self.kind == "webhook":
            parts = urlsplit(self.to)
            return f"webhook:{parts.scheme}://{parts.netloc}/{HIDDEN}"  # a login is refused
        first, _, rest = self.to.partition(" ")
        program = first if PROGRAM.fullmatch(first) else HIDDEN
        return f"cmd:{program} {HIDDEN}" if rest and program != HIDDEN else f"cmd:{program}"

    @property
    def variable(self) -> str:
        """Return the environment variable that has its URL, or nothing."""
        place = self.written.removeprefix("webhook:env:")
        return "" if place == self.written else place

    @property
    def file(self) -> Path | None:
        """Return the file that has its URL, if one has."""
        place = self.written.removeprefix("webhook:file:")
        return None if place == self.written else Path(place)

    @property
    def secret(self) -> str:
        """Return the part that no record may show, or nothing."""
        return "" if self.kind == "mail" or self.shown.endswith(self.to) else self.to


def parse(written: str, environment: Mapping[str, str] = os.environ) -> Target:
    """Understand one value of --notify, and read the URL from where it says."""
    kind, colon, rest = written.partition(":")
    if not colon or kind not in ("cmd", "webhook", "mail"):
        raise UsageError(f"--notify {kind if colon else written!r}: nobody is told that way", FIX)
    rest = rest.strip()
    if not rest or "\0" in rest:
        raise UsageError(f"--notify {kind}: says nobody", FIX)
    if kind == "webhook":
        return webhook(rest, environment)
    if kind == "mail" and not ADDRESS.fullmatch(rest):
        raise UsageError(f"--notify mail:{rest}: that is not an address", "mail:you@example.org")
    return Target(kind, f"{kind}:{rest}", rest)


def webhook(rest: str, environment: Mapping[str, str]) -> Target:
    """Find the URL of a webhook. No error shows it."""
    source, _, where = rest.partition(":")
    if source == "env":
        url, place = environment.get(where, "") if VARIABLE.fullmatch(where) else "", where
        problem = f"the variable {where} is not set here"
    elif source == "file":
        path = Path(where).expanduser().absolute()
        url, problem = read(path)
        place, rest = str(path), f"file:{path}"
    else:
        url, place, problem = rest, "its URL", ""
    url = url.strip()
    if not url:
        raise UsageError(f"--notify webhook:{source}:{where}: {problem}", FIX)
    if reason := refused(url):
        raise UsageError(f"--notify webhook: {place} {reason}", FIX)
    return Target("webhook", f"webhook:{rest}", url)


def read(path: Path) -> tuple[str, str]:
    """Return the URL that a file holds, or why there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LARGEST_BYTES), f"{path} is empty"
    except (OSError, UnicodeDecodeError) as error:
        return "", f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"


def refused(url: str) -> str:
    """Say why nothing can be posted there, or nothing."""
    if not re.fullmatch(r"[!-~]+", url):
        return "has characters that no URL has"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in ("http", "https") or not host:
        return "does not begin with http:// or https:// and a host"
    return "has a login, which is not sent" if parts.username is not None else ""


def parse_all(written: Sequence[str]) -> tuple[Target, ...]:
    return tuple(dict.fromkeys(map(parse, written)))


# -- kept for the heads that come later -------------------------------------------------------


def keep(experiment: Experiment, targets: Sequence[Target]) -> None:
    """Write down who is told, readable by this login alone."""
    if targets:
        rows = [[target.kind, target.written, target.to] for target in targets]
        experiment.write(NOTIFY, json.dumps(rows))


def kept(experiment: Experiment) -> tuple[Target, ...]:
    """Return who is told about this job; UsageError if another may have written it."""
    path = experiment.path / NOTIFY
    try:
        with files.open_plain(path) as file:
            status, text = os.fstat(file.fileno()), file.read(LARGEST_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"{path} is not this login's alone, and is not believed")
    try:
        return tuple(Target(*map(str, each)) for each in json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged", f"rm {path}; nobody is told then") from error
