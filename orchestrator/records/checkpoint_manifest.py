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
from typing import Annotated, Any

from orchestrator.common.text import plural
from orchestrator.protocol import message
from orchestrator.protocol.message import Check, Count, Moment, Nonsense

FORMAT = 1
NAME = "manifest.json"
LONGEST_TEXT = 4096  # of a name in it
Text = Annotated[str, Check("a name", lambda text: len(text) <= LONGEST_TEXT)]
Sha256 = Annotated[str, Check("a checksum", re.compile("[0-9a-f]{64}").fullmatch)]
PIECE_BYTES = 1 << 20  # read at a time; sha256 of 1 MiB takes about 1 ms


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a file."""

    size: Count
    sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    step: Count
    created: Moment  # Unix time
    progress: Any  # the state that the engine resumes from
    world: Count  # ranks that wrote it
    files: Mapping[str, FileRecord]
    save: Text = ""  # the same on every node, and another one in every run of the program
    hosts: Mapping[Text, Text] = dataclasses.field(
        default_factory=dict
    )  # whose disk has which file


def shown(name: str | Path) -> str:
    """Return a name as one line of text, whatever is in it."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def digest(
    path: Path, *, sync: bool = False, seen: Callable[[int], None] | None = None
) -> FileRecord:
    """Return size and sha256; with `sync`, of the bytes on the disk. seen() gets each size read."""
    checksum, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(PIECE_BYTES))
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
    data = {"format": FORMAT, **message.encode(manifest)}
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
        data = message.parse(text)
        if "format" not in data:
            raise ValueError("is not the manifest of a checkpoint")
        if data["format"] != FORMAT:
            raise ValueError(f"has format {data['format']!r}; this version reads {FORMAT}")
        manifest = message.decode(Manifest, data, newer=True)
    except Nonsense as error:
        raise ValueError(f"cannot be read: {shown(str(error))}") from None
    if problem := unfit_names(manifest.files) if manifest.files else "it lists no files":
        raise ValueError(f"is invalid: {problem}")
    return manifest


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


def problems(path: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Describe the files that are missing or have another size, without reading them."""
    found = {name: mis_sized(path, name, record) for name, record in files.items()}
    return {name: problem for name, problem in found.items() if problem}


def first_of(found: Mapping[str, str]) -> str:
    """Return the first of several problems, and how many more there are; nothing of none."""
    more = f", and {plural(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    return next(iter(found.values()), "") + more


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
