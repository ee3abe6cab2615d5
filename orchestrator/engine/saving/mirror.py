"""Copies checkpoints to object storage by fsspec in the background, and fetches them from there.

A mirror is a directory of checkpoints at a URL. As on a disk, a checkpoint is whole if it has its
manifest, which is copied last, and if each listed file has its sha256.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.common.errors import CheckFailed, import_optional
from orchestrator.common.text import Say
from orchestrator.engine.ranks.ranks import say_once
from orchestrator.records import checkpoint_manifest, checkpoint_store
from orchestrator.records.checkpoint_manifest import NAME, FileRecord, Manifest

PIECE_BYTES = 8 << 20
# How long the end of a training waits for the last copy.
LEAVING_SECONDS = 300.0


def remote_files(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path there, or raise CheckFailed."""
    fsspec = import_optional(
        "fsspec.core", "fsspec", "checkpoint.mirror needs the package fsspec, which"
    )
    try:
        files, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckFailed(
            f"checkpoint.mirror: {url} cannot be opened: {error}",
            "s3:// needs the package s3fs: pip install 'master-launch[mirror]'",
        ) from None
    return files, path


class Mirror:
    """Copies the newest checkpoint of this node, one at a time, in a thread of its own.

    During a copy, one later checkpoint waits, and a still later one replaces it. The mirror never
    delays or ends the training: the first failure is reported, the others until a success are not.
    In the mirror, the newest `keep` checkpoints of this run stay. `is_ours` recognises them by
    their progress. Checkpoints of other runs stay as well.
    """

    def __init__(self, url: str, keep: int, is_ours: Callable[[Any], bool]) -> None:
        self.url, self.keep, self.is_ours = url, keep, is_ours
        self.files, self.root = remote_files(url)
        self.waiting: tuple[Path, Sequence[str], bool] | None = None
        self.changed = threading.Condition()
        self.ends = self.failed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def copy(self, checkpoint: Path, names: Sequence[str], *, whole: bool) -> None:
        """Queue these files of a published checkpoint, with `whole` its manifest as well."""
        with self.changed:
            self.waiting = checkpoint, names, whole
            self.changed.notify_all()

    def close(self) -> None:
        """Wait up to LEAVING_SECONDS for the last copy."""
        with self.changed:
            self.ends = True
            self.changed.notify_all()
        self.thread.join(LEAVING_SECONDS)
        if self.thread.is_alive():
            say_once(f"WARNING: checkpoint.mirror: the last copy to {self.url} is not complete")

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting is not None or self.ends)
                if self.waiting is None:
                    return
                (checkpoint, names, whole), self.waiting = self.waiting, None
            try:
                # It may be pruned already. The next one is queued then.
                if checkpoint.exists():
                    self._copy(checkpoint, names, whole=whole)
                self.failed = False
            # Each kind of store has exceptions of its own.
            except Exception as error:  # noqa: BLE001
                if not self.failed:
                    say_once(
                        f"WARNING: checkpoint.mirror: {checkpoint.name} is not in {self.url}:"
                        f" {error}; the next checkpoint tries again"
                    )
                self.failed = True

    def _copy(self, checkpoint: Path, names: Sequence[str], *, whole: bool) -> None:
        target = f"{self.root}/{checkpoint.name}"
        with contextlib.ExitStack() as stack:
            # All files are opened first, because the checkpoint may be pruned during the copy.
            opened = [stack.enter_context((checkpoint / name).open("rb")) for name in names]
            text = (checkpoint / NAME).read_bytes()
            records = checkpoint_manifest.parse_manifest(text).files
            self.files.makedirs(target, exist_ok=True)
            for name, file in zip(names, opened, strict=True):
                with self.files.open(f"{target}/{name}", "wb") as out:
                    sent = copy_rest(file, out)
                if sent != records[name] or self.files.size(f"{target}/{name}") != sent.size:
                    raise OSError(f"{name} was damaged on its way")
        if whole:
            self.files.pipe_file(f"{target}/{NAME}", text)
            there = list_manifests(self.files, self.root)
            own = [path for manifest, _, path in there if self.is_ours(manifest.progress)]
            for old in own[self.keep :]:
                # Without its manifest, the rest does not count as a checkpoint.
                self.files.rm(f"{old}/{NAME}")
                self.files.rm(old, recursive=True)


def copy_rest(source: BinaryIO, target: BinaryIO) -> FileRecord:
    """Copy the rest of a file, and return its size and sha256."""
    size, total = 0, sha256()
    while piece := source.read(PIECE_BYTES):
        total.update(piece)
        target.write(piece)
        size += len(piece)
    return FileRecord(size, total.hexdigest())


def list_manifests(files: Any, root: str) -> list[tuple[Manifest, bytes, str]]:
    """Return (manifest, its text, path) of each checkpoint at or below a path, newest first."""
    found = []
    for path in [root, *files.ls(root, detail=False)] if files.exists(root) else []:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            text = files.cat_file(f"{path}/{NAME}")
            found.append((checkpoint_manifest.parse_manifest(text), text, path))
    return sorted(found, key=lambda each: each[0].created, reverse=True)


def fetch_checkpoint(url: str, directory: Path, say: Say) -> Path | None:
    """Fetch the newest whole checkpoint of a mirror. Return its directory, or None."""
    files, root = remote_files(url)
    for manifest, text, path in list_manifests(files, root):
        partial = checkpoint_store.partial_path(directory, manifest.step, "mirror")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for name, record in manifest.files.items():
                with files.open(f"{path}/{name}") as source, (partial / name).open("wb") as out:
                    if copy_rest(source, out) != record:
                        raise OSError(f"{name} is damaged: its sha256 is not the manifest's")
        except OSError as error:
            shutil.rmtree(partial)
            say(f"WARNING: step {manifest.step} of {url} is skipped: {error}")
            continue
        (partial / NAME).write_bytes(text)
        say(f"step {manifest.step} comes from {url}")
        return checkpoint_store.put_in_place(partial, directory, manifest.step)
    return None
