"""manifest.json of a checkpoint: its files with sizes and sha256, and the run's progress."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from orchestrator.common import files
from orchestrator.common.text import plural
from orchestrator.protocol import message
from orchestrator.protocol.message import Check, Count, Moment, Nonsense

FORMAT = 1
NAME = "manifest.json"
Sha256 = Annotated[str, Check("a checksum", re.compile("[0-9a-f]{64}").fullmatch)]


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a file."""

    size: Count
    sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    step: Count
    created: Moment  # Unix time
    # The state that the engine resumes from.
    progress: Any
    # The number of ranks that wrote it.
    world: Count
    files: Mapping[str, FileRecord]
    # Identifies the run that saved it: the same on every node, different for every run.
    save: str = ""
    # The host that wrote each file, if the nodes share no disk.
    hosts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def shown_name(name: str | Path) -> str:
    """Return a name as one printable line of text."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def describe_file(path: Path) -> FileRecord:
    """Return the size and sha256 of a file."""
    with path.open("rb") as file:
        return FileRecord(os.fstat(file.fileno()).st_size, files.file_digest(file.fileno()))


def manifest_to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **message.encode_value(manifest)}, indent=1)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a directory. Raise OSError or ValueError if it cannot be used."""
    if not stat.S_ISREG((path / NAME).lstat().st_mode):
        raise ValueError("is not a plain file")
    return parse_manifest((path / NAME).read_bytes())


def parse_manifest(text: bytes) -> Manifest:
    """Parse the text of a manifest. Raise ValueError if it is not valid."""
    try:
        data = message.parse_object(text)
        if "format" not in data:
            raise ValueError("is not the manifest of a checkpoint")
        if data["format"] != FORMAT:
            raise ValueError(f"has format {data['format']!r}; this version reads {FORMAT}")
        manifest = message.decode_value(Manifest, data, newer=True)
    except Nonsense as error:
        raise ValueError(f"cannot be read: {shown_name(str(error))}") from None
    if problem := unfit_names(manifest.files) if manifest.files else "it lists no files":
        raise ValueError(f"is invalid: {problem}")
    return manifest


def unfit_names(names: Iterable[str]) -> str:
    """Describe the first name that cannot be a file of a checkpoint, or return an empty string."""
    for name in names:
        try:
            written = os.fsencode(name)
        except UnicodeEncodeError:
            written = b""
        if written in (b"", b".", b"..", NAME.encode()) or set(b"/\0") & set(written):
            return f"{name!r} is not the name of a file of a checkpoint"
    return ""


def size_problems(path: Path, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """Return the problems of files that are missing or have another size, by name."""
    found = {name: size_problem(path, name, record) for name, record in records.items()}
    return {name: problem for name, problem in found.items() if problem}


def first_problem(found: Mapping[str, str]) -> str:
    """Return the first of several problems with the number of others, or an empty string."""
    more = f", and {plural(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    return next(iter(found.values()), "") + more


def size_problem(path: Path, name: str, record: FileRecord) -> str:
    try:
        status = (path / name).lstat()
    except FileNotFoundError:
        return f"{shown_name(name)} is missing"
    except OSError as error:
        return f"{shown_name(name)} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{shown_name(name)} is not a plain file"
    if status.st_size != record.size:
        return f"{shown_name(name)} has {status.st_size} bytes instead of {record.size}"
    return ""
