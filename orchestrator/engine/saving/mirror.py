"""Copy checkpoints to object storage by fsspec in the background, and get them back from there.

A mirror is a directory of checkpoints at a URL. What makes one whole is the same as on a disk: its
manifest, which is copied last, and the sha256 of each file that it lists.
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
LEAVING_SECONDS = 300.0  # for the last copy, when a training ends


def is_url(text: str) -> bool:
    return "://" in text


def remote(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there; refuse what cannot be reached."""
    fsspec = import_optional("fsspec.core", "fsspec", "checkpoint.mirror needs the package fsspec,"
                             " which")  # fmt: skip
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

    A checkpoint that comes while another is copied waits, and replaces one that waits already.
    Nothing here holds the training up or ends it: a failure is said once, until a copy succeeds.
    Of what is there, the newest `keep` of this run stay, as `is_ours` tells from their progress,
    and all of other runs.
    """

    def __init__(self, url: str, keep: int, is_ours: Callable[[Any], bool]) -> None:
        self.url, self.keep, self.is_ours = url, keep, is_ours
        self.files, self.root = remote(url)
        self.waiting: tuple[Path, Sequence[str], bool] | None = None
        self.changed = threading.Condition()
        self.ends = self.failed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def copy(self, checkpoint: Path, names: Sequence[str], *, whole: bool) -> None:
        """Copy these files of a published checkpoint some time; `whole`: then its manifest."""
        with self.changed:
            self.waiting = checkpoint, names, whole
            self.changed.notify_all()

    def close(self) -> None:
        """Wait for the last copy, for a while."""
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
                if checkpoint.exists():  # it may be pruned, and the next one comes
                    self._copy(checkpoint, names, whole=whole)
                self.failed = False
            except Exception as error:  # noqa: BLE001 (each store has its own)
                if not self.failed:
                    say_once(f"WARNING: checkpoint.mirror: {checkpoint.name} is not in {self.url}:"
                             f" {error}; the next checkpoint tries again")  # fmt: skip
                self.failed = True

    def _copy(self, checkpoint: Path, names: Sequence[str], *, whole: bool) -> None:
        target = f"{self.root}/{checkpoint.name}"
        with contextlib.ExitStack() as stack:
            # All are open from the beginning: the checkpoint may be pruned while they are copied.
            opened = [stack.enter_context((checkpoint / name).open("rb")) for name in names]
            text = (checkpoint / NAME).read_bytes()
            records = checkpoint_manifest.parse(text).files
            self.files.makedirs(target, exist_ok=True)
            for name, file in zip(names, opened, strict=True):
                with self.files.open(f"{target}/{name}", "wb") as out:
                    sent = transfer(file, out)
                if sent != records[name] or self.files.size(f"{target}/{name}") != sent.size:
                    raise OSError(f"{name} was damaged on its way")
        if whole:
            self.files.pipe_file(f"{target}/{NAME}", text)
            there = manifests(self.files, self.root)
            own = [path for manifest, _, path in there if self.is_ours(manifest.progress)]
            for old in own[self.keep :]:
                self.files.rm(f"{old}/{NAME}")  # first: what is left of it is no checkpoint
                self.files.rm(old, recursive=True)


def transfer(source: BinaryIO, target: BinaryIO) -> FileRecord:
    """Copy all that follows, and sum it up."""
    size, total = 0, sha256()
    while piece := source.read(PIECE_BYTES):
        total.update(piece)
        target.write(piece)
        size += len(piece)
    return FileRecord(size, total.hexdigest())


def manifests(files: Any, root: str) -> list[tuple[Manifest, bytes, str]]:
    """Return the manifests of the checkpoints at a path, or of the one there; the last first."""
    found = []
    for path in [root, *files.ls(root, detail=False)] if files.exists(root) else []:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            text = files.cat_file(f"{path}/{NAME}")
            found.append((checkpoint_manifest.parse(text), text, path))
    return sorted(found, key=lambda each: each[0].created, reverse=True)


def fetch(url: str, directory: Path, say: Say) -> Path | None:
    """Bring the newest checkpoint that is whole from a mirror; return its directory."""
    files, root = remote(url)
    for manifest, text, path in manifests(files, root):
        partial = checkpoint_store.partial(directory, manifest.step, "mirror")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for name, record in manifest.files.items():
                with files.open(f"{path}/{name}") as source, (partial / name).open("wb") as out:
                    if transfer(source, out) != record:
                        raise OSError(f"{name} is damaged: its sha256 is not the manifest's")
        except OSError as error:
            shutil.rmtree(partial)
            say(f"WARNING: step {manifest.step} of {url} is skipped: {error}")
            continue
        (partial / NAME).write_bytes(text)
        say(f"step {manifest.step} comes from {url}")
        return checkpoint_store.put_in_place(partial, directory, manifest.step)
    return None
