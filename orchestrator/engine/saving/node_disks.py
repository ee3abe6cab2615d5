"""Read a checkpoint whose files are on the disks of several nodes, which share none.

What counts is verified where it lies. Then each rank is sent the parts of tensors that it needs and
its node lacks; what is damaged on one node is taken from another.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator.engine.ranks.ranks import Ranks, gather, host_group
from orchestrator.engine.saving import carry, reader
from orchestrator.engine.saving.exchange import Exchange, Parts
from orchestrator.engine.saving.pieces import Kept, Piece
from orchestrator.engine.saving.reader import METADATA, PieceReader
from orchestrator.records import checkpoint_manifest, checkpoint_parts
from orchestrator.records.checkpoint_manifest import Manifest
from orchestrator.records.checkpoint_parts import Candidate, Holding
from orchestrator.records.checkpoint_store import Checkpoint

File = tuple[str, str]  # the checksum of its manifest, and its name
Damaged = tuple[int, str, str]  # node, checksum of the manifest, file


def pool(checkpoints: Sequence[Checkpoint], ranks: Ranks) -> list[Candidate]:
    """Put together what all nodes have, the newest first."""
    first = ranks.rank == ranks.neighbours[0]
    mine = (
        [holding for checkpoint in checkpoints if (holding := held(checkpoint, node_of(ranks)))]
        if first
        else []
    )
    return checkpoint_parts.candidates(checkpoint for some in gather(mine) for checkpoint in some)


def held(checkpoint: Checkpoint, node: int) -> Holding | None:
    """Tell what this node has of a checkpoint; of what others may have written, nothing."""
    if not checkpoint.files or checkpoint.foreign:
        return None
    try:
        manifest = (checkpoint.path / checkpoint_manifest.NAME).read_bytes()
    except OSError:
        return None
    here = frozenset(
        name
        for name, record in checkpoint.files.items()
        if not checkpoint_manifest.mis_sized(checkpoint.path, name, record)
    )
    return Holding(
        node,
        checkpoint.step,
        checkpoint.save,
        checkpoint.created,
        hashlib.sha256(manifest).hexdigest(),
        checkpoint.files,
        here,
        checkpoint.hosts,
        str(checkpoint.path),
        checkpoint.generation,
    )


def node_of(ranks: Ranks) -> int:
    return ranks.nodes[ranks.rank][0]


class NodeDisks:
    """One candidate on the disks of all nodes. Every rank makes one, and calls it alike."""

    def __init__(self, candidate: Candidate, ranks: Ranks) -> None:
        self.candidate, self.ranks, self.node = candidate, ranks, node_of(ranks)
        self.members = carry.of_nodes(ranks.nodes)
        self.version = candidate.version_for(self.node)
        self.here = {
            manifest: Path(holding.path)
            for manifest, version in candidate.versions.items()
            for holding in version.holdings
            if holding.node == self.node
        }
        self.sources: dict[tuple[int, File], int] = {}  # (node, file) -> the node that gives it

    def manifest(self) -> Manifest:
        """Read the manifest, here or on a node that has it."""
        texts = self._of_each_version(checkpoint_manifest.NAME)
        return checkpoint_manifest.parse(texts[self.version])

    def _of_each_version(self, name: str) -> dict[str, bytes]:
        """Give all ranks a small file of each version that any node reads; b"" is not to be had."""
        found = {}
        for manifest in sorted({self.candidate.version_for(node) for node in self.members}):
            version, box = self.candidate.versions[manifest], [b""]
            nodes = version.holders(name) or [holding.node for holding in version.holdings]
            source = self.members[nodes[0]][0]
            if self.ranks.rank == source:
                with contextlib.suppress(OSError):
                    box = [(self.here[manifest] / name).read_bytes()]
            dist.broadcast_object_list(box, source, host_group())
            found[manifest] = box[0]
        return found

    def metadata(self) -> tuple[dict[str, Any], set[Damaged]]:
        """Read the metadata of each version that any node reads, and tell where it is damaged."""
        texts, bad = self._of_each_version(METADATA), set[Damaged]()
        for manifest, content in texts.items():
            version = self.candidate.versions[manifest]
            if hashlib.sha256(content).hexdigest() != version.files[METADATA].sha256:
                bad.add((version.holders(METADATA)[0], manifest, METADATA))
        return {} if bad else {name: reader.metadata_in(text) for name, text in texts.items()}, bad

    def kept(self, metadata: Mapping[str, Any]) -> Kept:
        """Say which parts of tensors the files of this node's version hold, wherever they are."""
        files = reader.places_in(metadata[self.version])
        return {(self.version, name): places for name, places in files.items()}

    @property
    def near(self) -> set[File]:
        """Name the files of this node's version that it has by itself."""
        version = self.candidate.versions[self.version]
        return {
            (self.version, name) for name in version.files if self.node in version.holders(name)
        }

    def damaged(self, pieces: Iterable[Piece]) -> set[Damaged]:
        """Read every byte of the files that are needed, where they lie; ranks share the work."""
        everyone = gather((self.node, {piece.shard[1] for piece in pieces}))
        needs: dict[int, set[str]] = {}
        for node, names in everyone:
            needs.setdefault(node, set()).update(names)
        used = {
            (node, (self.candidate.version_for(node), name))
            for node, names in needs.items()
            for name in names
        }
        for delivery in checkpoint_parts.deliveries(self.candidate, needs):
            file = delivery.manifest, delivery.name
            self.sources[delivery.target, file] = delivery.source
        mine = sorted({file for node, file in used if self._source(node, file) == self.node})
        neighbours = self.ranks.neighbours
        bad = set()
        for manifest, name in mine[neighbours.index(self.ranks.rank) :: len(neighbours)]:
            record = self.candidate.versions[manifest].files[name]
            try:
                good = checkpoint_manifest.digest(self.here[manifest] / name) == record
            except OSError:
                good = False
            if not good:
                bad.add((self.node, manifest, name))
        return set().union(*gather(bad))

    def _source(self, node: int, file: Any) -> int:
        return self.sources.get((node, file), node)

    def server(self, shard: Any) -> int:
        """Choose the rank that gives a file to this one: itself, if its node has it."""
        source = self._source(self.node, shard)
        there = self.members[source]
        return self.ranks.rank if source == self.node else there[self.ranks.rank % len(there)]

    def fill(self, pieces: Sequence[Piece], into: Parts, metadata: Mapping[str, Any]) -> int:
        """Fill the tensors, and return how many bytes came to any node from others."""
        readers = functools.cache(
            lambda manifest: PieceReader(self.here[manifest], metadata[manifest])
        )

        def read(pieces: Sequence[Piece], parts: Sequence[Any]) -> None:
            for manifest in dict.fromkeys(piece.shard[0] for piece in pieces):
                own = [number for number, p in enumerate(pieces) if p.shard[0] == manifest]
                readers(manifest).read([pieces[n] for n in own], [parts[n] for n in own])

        exchange = Exchange(pieces, self.server, read, self.ranks.rank, host_group())
        exchange.bring(into)
        return sum(piece.bytes for far in exchange.far for _, piece in far)
