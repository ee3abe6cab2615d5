"""Choose which node gives which file, so that checkpoints come whole from nodes that have parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.protocol.requests.transfer import OutputFile
from orchestrator.records import checkpoint_manifest, checkpoint_parts
from orchestrator.records.checkpoint_manifest import Manifest
from orchestrator.records.checkpoint_parts import Candidate, Holding

STEP = re.compile(r"(checkpoints/step_[0-9]+)(?:/(.+))?")
HERE = -1  # this machine, among the nodes


@dataclass(frozen=True)
class NodeOffer:
    """List the files of one node, and the manifests of its checkpoints by their directories."""

    node: int
    files: Sequence[OutputFile]
    manifests: Mapping[str, bytes]


@dataclass(frozen=True)
class ChosenGivers:
    """Who gives each file, and which checkpoints do not come because parts of them are nowhere."""

    givers: dict[str, int] = field(default_factory=dict)  # by the path
    short: dict[str, str] = field(default_factory=dict)  # why, by the directory


def is_manifest(path: str) -> bool:
    match = STEP.fullmatch(path)
    return match is not None and match[2] == checkpoint_manifest.NAME


def gather(nodes: Sequence[NodeOffer], root: Path) -> ChosenGivers:
    """Give every checkpoint that the nodes have whole together; `root` is where it goes to."""
    found: dict[str, list[Holding]] = {}
    gathering = ChosenGivers()
    for node in nodes:
        sizes = {file.path: file.size for file in node.files if file.kind == "file"}
        for directory, text in node.manifests.items():
            try:
                manifest = checkpoint_manifest.parse(text)
            except (ValueError, RecursionError) as error:
                gathering.short[directory] = f"its manifest {error}"
                continue
            holding = holding_of(node.node, directory, text, manifest, sizes)
            found.setdefault(directory, []).append(holding)
    for directory, holdings in found.items():
        candidates = checkpoint_parts.candidates(holdings)
        whole = [candidate for candidate in candidates if candidate.whole]
        if not whole:
            gathering.short[directory] = candidates[0].shortage()
            continue
        gathering.short.pop(directory, None)
        choose(gathering, directory, preferred(whole, root / directory))
    return gathering


def holding_of(
    node: int,
    directory: str,
    text: bytes,
    manifest: Manifest,
    sizes: Mapping[str, int],
) -> Holding:
    """Return what a node has of the checkpoint in one of its directories."""
    files = manifest.files
    here = {name for name in files if sizes.get(f"{directory}/{name}") == files[name].size}
    return Holding(
        node=node,
        step=manifest.step,
        save=manifest.save,
        created=manifest.created,
        manifest=hashlib.sha256(text).hexdigest(),
        files=files,
        here=frozenset(here),
        hosts=manifest.hosts,
        generation=checkpoint_manifest.generation(manifest.progress),
    )


def preferred(whole: Sequence[Candidate], directory: Path) -> Candidate:
    """Go on with the one that has begun to come, where each node has one of its own."""
    try:
        begun = hashlib.sha256((directory / checkpoint_manifest.NAME).read_bytes()).hexdigest()
    except OSError:
        begun = ""
    for candidate in whole:
        version = candidate.versions.get(begun)
        if version is not None and not version.lacking:
            return replace(candidate, versions={begun: version})
    return whole[0]


def choose(gathering: ChosenGivers, directory: str, candidate: Candidate) -> None:
    """Let those give that have least to give."""
    version = candidate.versions[candidate.version_for(HERE)]
    for each in checkpoint_parts.deliveries(candidate, {HERE: version.files}):
        gathering.givers[f"{directory}/{each.name}"] = each.source
    manifest = f"{directory}/{checkpoint_manifest.NAME}"
    gathering.givers[manifest] = version.holdings[0].node
