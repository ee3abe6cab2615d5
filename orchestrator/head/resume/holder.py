"""A node that has checkpoints, or is to have them, and what it says it has."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from orchestrator.head.chores.pull import LIST_SECONDS, content
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.outputs.fetch import plain
from orchestrator.protocol.messages import Checkpoints, OutputFile
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_parts import Holding


@dataclass
class Holder:
    """One node. The lock is for its channel, which answers one question at a time."""

    name: str
    login: Login
    address: str = ""  # where other nodes may reach it
    channel: NodeChannel | None = None
    job: tuple[str, int] = ("", 0)  # its part of the job that resumes
    place: str = ""  # that its files are below
    files: dict[str, OutputFile] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # by their checksums
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def open(self) -> NodeChannel:
        assert self.channel is not None
        return self.channel

    def look(self, question: Checkpoints, number: int) -> list[Holding]:
        """Ask the node what it has, and number it in the answer."""
        with self.lock:
            listing = self.open.ask(question, LIST_SECONDS)
            self.place = listing.place
            self.files = {file.path: file for file in listing.files if plain(file.path)}
            held = []
            for path in self.files:
                directory, _, name = path.rpartition("/")
                if name == checkpoint_manifest.NAME and directory:
                    try:
                        text = content(self.open, self.place, self.files[path])
                    except Declined:
                        continue  # it was pruned meanwhile, or cannot be read
                    held += self.read(directory, text, number)
        return held

    def read(self, directory: str, text: bytes, number: int) -> list[Holding]:
        """Return what is in one directory; nothing, where its manifest is none."""
        try:
            manifest = checkpoint_manifest.parse(text)
        except (ValueError, RecursionError):
            return []
        here = {
            name
            for name, record in manifest.files.items()
            if (file := self.files.get(f"{directory}/{name}")) and file.size == record.size
        }
        checksum = hashlib.sha256(text).hexdigest()
        self.manifests[checksum] = text
        return [
            Holding(
                *(number, manifest.step, manifest.save, manifest.created, checksum),
                *(manifest.files, frozenset(here), manifest.hosts),
                path=f"{self.place}/{directory}",
                generation=checkpoint_manifest.generation(manifest.progress),
            )
        ]
