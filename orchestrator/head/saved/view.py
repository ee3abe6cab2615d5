"""Ask each node which of the files that the program saved it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.outputs.fetch import plain
from orchestrator.head.resume.holder import Holder
from orchestrator.protocol.requests.saved import AskSaved, Saved, SavedFile

ANSWER_SECONDS = 15.0


class Key(NamedTuple):
    """The name of a file on all nodes: a place, and a path below it."""

    place: str
    path: str

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.path if self.place == "work" else f"{self.place.rpartition('/')[2]}/{self.path}"


@dataclass(frozen=True)
class View:
    """One node, and what it has."""

    name: str
    files: Mapping[Key, SavedFile] = field(default_factory=dict)  # and links
    directories: Mapping[Key, int] = field(default_factory=dict)  # nanoseconds
    roots: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True  # these are all
    shared: bool = False
    kept: bool = False
    numbers: frozenset[int] = frozenset()  # of itself and its ranks, in the last attempt


def look(
    holders: Sequence[Holder], given: Sequence[str], numbers: Mapping[str, frozenset[int]]
) -> list[View]:
    """Ask each node; one that does not answer has nothing, and that may not be all."""

    def ask(holder: Holder) -> Saved:
        job, node = holder.job
        with holder.lock:
            return holder.open.ask(AskSaved(job=job, node=node, given=tuple(given)), ANSWER_SECONDS)

    answers = fleet.everywhere(holders, ask)
    return [
        View(holder.name, whole=False)
        if isinstance(answer, OrchestratorError)
        else view(holder.name, answer, numbers.get(holder.name, frozenset()))
        for holder, answer in zip(holders, answers, strict=True)
    ]


def view(name: str, saved: Saved, numbers: frozenset[int]) -> View:
    """Take what a node says, but for names that lead out of its directories."""
    known = [file for file in saved.files if plain(file.path) and file.place in saved.roots]
    return View(
        name,
        {Key(file.place, file.path): file for file in known if file.kind != "directory"},
        {Key(file.place, file.path): file.changed for file in known if file.kind == "directory"},
        saved.roots,
        saved.whole,
        saved.shared,
        saved.kept,
        numbers,
    )
