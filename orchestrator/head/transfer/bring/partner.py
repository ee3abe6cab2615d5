"""A node that may have checkpoints of a job, or is to have them: what it says it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.head.connect.channel import Declined
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.fetch.gathered import holding_of
from orchestrator.head.transfer.fetch.pull import LIST_SECONDS, content
from orchestrator.head.transfer.peer import Peer
from orchestrator.protocol.requests.transfer import Checkpoints, OutputFile
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_parts import Holding


@dataclass(eq=False)
class Partner(Peer):
    """One node, which may not be connected to yet."""

    login: Login | None = None
    job: tuple[str, int] = ("", 0)  # its part of the job that resumes
    place: str = ""  # that its files are below
    files: Mapping[str, OutputFile] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # by their checksums

    def checkpoints(self, question: Checkpoints, number: int) -> list[Holding]:
        """Ask the node what it has, and number it in the answer."""
        with self.lock:
            listing = self.open.ask(question, LIST_SECONDS)
            self.place = listing.place
            self.files = {file.path: file for file in listing.files if plain(file.path)}
            sizes = {path: file.size for path, file in self.files.items()}
            holdings = []
            for path in self.files:
                directory, _, name = path.rpartition("/")
                if name != checkpoint_manifest.NAME or not directory:
                    continue
                try:
                    text = content(self.open, self.place, self.files[path])
                    manifest = checkpoint_manifest.parse(text)
                except (Declined, ValueError, RecursionError):
                    continue  # it was pruned meanwhile, cannot be read, or is none
                where = f"{self.place}/{directory}"
                holding = holding_of(number, directory, text, manifest, sizes, where)
                self.manifests[holding.manifest] = text
                holdings.append(holding)
        return holdings
