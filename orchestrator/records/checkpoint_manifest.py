"""manifest.json of a checkpoint: its files with their sizes and sha256, and the run's progress."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.permissions import others
from orchestrator.common.text import plural

FORMAT = 1
NAME = "manifest.json"
LONGEST_TEXT = 4096  # of a name in it
LAST_GENERATION = 1 << 60  # more is none of ours
PIECE = 1 << 20  # read at a time; sha256 of 1 MiB takes about 1 ms


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    created: float  # Unix time
    progress: Any  # the state that the engine resumes from
    world: int  # ranks that wrote it
    files: Mapping[str, FileRecord]
    save: str = ""  # the same on every node, and another one in every run of the program
    hosts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # whose disk has which file


def shown(name: str | Path) -> str:
    """Return a name as one line of text, whatever is in it."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def generation(progress: Any) -> int:
    """Return which start of a training saved this: each has a higher one than those before it.

    0 where an earlier version saved it, which did not say.
    """
    run = progress.get("run") if isinstance(progress, Mapping) else None
    number = run.get("generation") if isinstance(run, Mapping) else None
    return number if type(number) is int and 0 <= number < LAST_GENERATION else 0


def order(generation: int, step: int, created: float) -> tuple[float, ...]:
    """Sort states by when they were saved, whatever the clocks of the machines that saved them say.

    Within a generation steps only grow. Only of states that have none do clocks decide.
    """
    return (generation, step) if generation else (0, created, step)


def digest(
    path: Path, *, sync: bool = False, seen: Callable[[int], None] | None = None
) -> FileRecord:
    """Return size and sha256; with `sync`, of the bytes on the disk. seen() gets each size read."""
    checksum, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(piece):
            checksum.update(piece[:count])
            size += count
            if seen:
                seen(count)
    return FileRecord(size, checksum.hexdigest())


def to_json(manifest: Manifest) -> str:
    data = {"format": FORMAT, **dataclasses.asdict(manifest)}
    apart = {name: data.pop(name) for name in ("save", "hosts")}
    return json.dumps({**data, **{name: value for name, value in apart.items() if value}}, indent=1)


def read(path: Path) -> Manifest:
    """Read a manifest; OSError and ValueError say what is wrong with it."""
    if not stat.S_ISREG((path / NAME).lstat().st_mode):
        raise ValueError("is not a plain file")
    return parse((path / NAME).read_bytes())


def parse(text: bytes) -> Manifest:
    """Read what a manifest says; a ValueError says what is wrong with it."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError("is not the manifest of a checkpoint")
    if data["format"] != FORMAT:
        raise ValueError(f"has format {data['format']!r}; this version reads {FORMAT}")
    created = data.get("created")
    if not isinstance(created, (int, float)) or not 0 <= created < 1e12:
        raise ValueError("does not say when it was written")
    return Manifest(
        step=_whole(data.get("step"), "step"),
        created=float(created),
        world=_whole(data.get("world"), "world"),
        progress=data.get("progress"),
        files=_records(data.get("files")),
        save=_text(data.get("save", ""), "save"),
        hosts=_hosts(data.get("hosts", {})),
    )


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise ValueError(f"has {value!r:.40} as {what}")
    return value


def _hosts(data: Any) -> dict[str, str]:
    if not isinstance(data, dict):
        raise ValueError("has something else than names as hosts")
    return {_text(name, "a file"): _text(host, "a host") for name, host in data.items()}


def _records(data: Any) -> dict[str, FileRecord]:
    if not isinstance(data, dict) or not data:
        raise ValueError("lists no files")
    records = {}
    for name, record in data.items():
        digest = record.get("sha256") if isinstance(record, dict) else None
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise ValueError(f"has no checksum of {shown(name)}")
        records[name] = FileRecord(_whole(record.get("size"), f"size of {shown(name)}"), digest)
    if problem := unfit_names(records):
        raise ValueError(f"is invalid: {problem}")
    return records


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:  # True is an int too
        raise ValueError(f"has {value!r} as {what}")
    return value


def unfit_names(names: Iterable[str]) -> str:
    """Name the first that cannot be a file in the directory of a checkpoint."""
    for name in names:
        try:
            written = os.fsencode(name)
        except UnicodeEncodeError:
            written = b""
        if written in (b"", b".", b"..", NAME.encode()) or set(b"/\0") & set(written):
            return f"{name!r} is not the name of a file of a checkpoint"
    return ""


def shortfall(path: Path, files: Mapping[str, FileRecord]) -> str:
    """Name the files that are missing or have another size, without reading them."""
    if not files:
        return "it has no files"
    problems = [problem for name in files if (problem := mis_sized(path, name, files[name]))]
    more = f", and {plural(len(problems) - 1, 'more file')}" if problems[1:] else ""
    return problems[0] + more if problems else ""


def lacking(path: Path, files: Mapping[str, FileRecord]) -> tuple[str, ...]:
    """List the files that are not there at all: other nodes may have them."""
    return tuple(name for name in files if not os.path.lexists(path / name))


def exposed(path: Path, files: Mapping[str, FileRecord]) -> str:
    """Say who besides us may have written any of it, or nothing."""
    for name in (".", NAME, *files):
        try:
            problem = others((path / name).lstat())
        except OSError:
            continue  # shortfall() knows
        if problem:
            return problem
    return ""


def mis_sized(path: Path, name: str, record: FileRecord) -> str:
    try:
        status = (path / name).lstat()
    except FileNotFoundError:
        return f"{shown(name)} is missing"
    except OSError as error:
        return f"{shown(name)} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{shown(name)} is not a plain file"
    if status.st_size != record.size:
        return f"{shown(name)} has {status.st_size} bytes instead of {record.size}"
    return ""
