"""A node that has files of a job, or is to have them: what it says it has, gives and takes.

A server leaves a head that is silent, so a thread for each node keeps it while others are asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import Declined, NodeChannel
from orchestrator.head.connect.ssh_config import Login
from orchestrator.head.screen.output import Progress
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.fetch.pull import LIST_SECONDS, content
from orchestrator.head.transfer.take import QUICK_SECONDS, take
from orchestrator.protocol.requests.request import Beat
from orchestrator.protocol.requests.saved import TakeSaved
from orchestrator.protocol.requests.transfer import (
    Checkpoints,
    EndGiving,
    GiveFiles,
    GivingNode,
    OutputFile,
    TakeFiles,
)
from orchestrator.protocol.timing import HEAD_BEAT
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_parts import Holding

BEAT_SECONDS = 30.0  # for the answer to a beat


@dataclass
class Partner:
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

    def give(self, directory: str, files: Iterable[str], seconds: float) -> GivingNode | None:
        """Let it listen for nodes that take these files; None where it may not."""
        token = secrets.token_hex(32)
        names = tuple(sorted(files))
        request = GiveFiles(directory=directory, files=names, token=token, seconds=seconds)
        with self.lock:
            port = self.open.ask(request, QUICK_SECONDS).port
        addresses = dict.fromkeys((self.address, self.open.connection.address))
        if not port:
            return None
        return GivingNode(addresses=tuple(filter(None, addresses)), port=port, token=token)

    def end_giving(self) -> None:
        with contextlib.suppress(NodeError), self.lock:
            self.open.ask(EndGiving(), QUICK_SECONDS)

    def take(
        self, request: TakeFiles | TakeSaved, progress: Progress, stopped: Callable[[], None]
    ) -> str:
        """Have it take files from another; return why they did not come, or nothing."""

        def give_up(_: int) -> bool:
            stopped()
            return False

        return take(self.open, request, progress.add, give_up, self.lock).problem

    def checkpoints(self, question: Checkpoints, number: int) -> list[Holding]:
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


class Beats:
    """The beats of all nodes that take part, from when they are reached until `end`."""

    def __init__(self, partners: Iterable[Partner] = ()) -> None:
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        for partner in partners:
            self.begin(partner)

    def begin(self, partner: Partner) -> None:
        thread = threading.Thread(target=self.beat, args=(partner,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def beat(self, partner: Partner) -> None:
        while not self.over.wait(HEAD_BEAT):
            if partner.lock.acquire(blocking=False):  # else somebody asks it something just now
                try:
                    with contextlib.suppress(NodeError):  # whoever needs the node hears that
                        partner.open.ask(Beat(), BEAT_SECONDS)
                finally:
                    partner.lock.release()

    def end(self) -> None:
        """End them, and return once nobody reads from these channels any more."""
        self.over.set()
        for thread in self.threads:
            thread.join()
