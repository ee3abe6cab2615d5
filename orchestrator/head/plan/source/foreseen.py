"""Compares what a program imports and opens with what the nodes have, and says what to type."""

from __future__ import annotations

import os
import posixpath
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orchestrator.common.hiding import redacted_text
from orchestrator.common.hosts import listed
from orchestrator.common.program import MOST_ABOVE, own_place
from orchestrator.head.nodes import packages
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import Foreseen, Guess
from orchestrator.head.plan.source.imports import ALWAYS, LATER
from orchestrator.head.plan.source.paths import ASKS, READS, WRITES, Touch, within
from orchestrator.head.plan.source.program import Program
from orchestrator.node.transfer.outputs import STAY_HIDDEN

MOST_ASKED = 300  # of modules, and of paths
OURS = ("orchestrator",)  # it travels with each launch
REQUIREMENTS = "requirements.txt"


@dataclass(frozen=True)
class Sent:
    """The files of this directory that a launch sends, and the nodes that get them.

    `apart` are those that get none and do not share this directory either.
    """

    paths: frozenset[str] = frozenset()  # directories, too
    nodes: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    @classmethod
    def of(cls, files: Iterable[bytes], nodes: Iterable[str], apart: Iterable[str] = ()) -> Sent:
        places = [PurePosixPath(os.fsdecode(file)) for file in files]
        every = frozenset(str(path) for place in places for path in (place, *place.parents))
        return cls(every, frozenset(nodes), frozenset(apart))


def modules_of(program: Program) -> tuple[str, ...]:
    """Return the packages that nodes are asked for."""
    wanted = [item.module for item in program.imports if item.when <= LATER]
    return tuple(name for name in wanted if name not in OURS)[:MOST_ASKED]


def paths_of(program: Program) -> tuple[str, ...]:
    """Return the paths that nodes are asked for."""
    return tuple(dict.fromkeys(path for path, _ in opened(program)))[:MOST_ASKED]


def opened(program: Program) -> Iterator[tuple[str, Touch]]:
    """Yield the paths that the program reads and has neither made itself nor asked for."""
    if program.moves:
        return
    minded = {normal(touch) for touch in program.touches if touch.how in (WRITES, ASKS)}
    for touch in program.touches:
        if touch.how == READS and touch.whole and not touch.guarded:
            path = normal(touch)
            if not within(path, minded) and path != ".":
                yield path, touch


def normal(touch: Touch) -> str:
    """Write a path in one way; of one that is not known to its end, the directory."""
    text = touch.path if touch.whole else posixpath.dirname(touch.path) or touch.path
    return posixpath.normpath(text)


def foresee(program: Program, nodes: Sequence[ProbedNode], sent: Sent, here: Path) -> Foreseen:
    """Say what the program will lack or lose on these nodes."""
    missing = list(imports(program, nodes, here))
    version = next((node.facts.torch for node in nodes if node.facts.torch), "")
    guesses = [*missing, *reads(program, nodes, sent, here), *writes(program, sent)]
    return Foreseen(
        files=program.files,
        guesses=tuple(guesses),
        fixes=tuple(fixes(program, missing, nodes, here)) if missing else (),
        command=whole_environment(program, version, here),
        problems=program.problems,
    )


# -- modules ------------------------------------------------------------------------------------


def imports(program: Program, nodes: Sequence[ProbedNode], here: Path) -> Iterator[Guess]:
    for item in program.imports:
        lacking = tuple(n.name for n in nodes if item.module in n.facts.missing_modules)
        if lacking and item.when <= LATER:
            everywhere = len(lacking) == len(nodes)
            why = "no node has it" if everywhere else f"{listed(lacking)} lack it"
            if item.module in sys.stdlib_module_names:
                why += ": it is of another version of Python"
            elif item.module in packages.WITH_CUDA:
                why += ": it comes with torch's CUDA build"
            elif place := own_place(item.module, str(here)):
                why += ", and it is here" if place == "." else f", and it is in ./{place}"
            nodes_of = () if everywhere else lacking
            yield Guess(
                *("imports", item.module, item.file, item.line, why, nodes_of),
                certain=item.when == ALWAYS,
            )


def fixes(
    program: Program, missing: Sequence[Guess], nodes: Sequence[ProbedNode], here: Path
) -> Iterator[str]:
    """Say what to type for the modules that are missing."""
    items = {item.module: item for item in program.imports if item.when <= LATER}
    lacking = [guess.name for guess in missing]
    own = {name: place for name in lacking if (place := own_place(name, str(here)))}
    for place in dict.fromkeys(own.values()):
        names = [name for name in lacking if own.get(name) == place]
        yield f"--env PYTHONPATH={place}   for {listed(names)}"
    install = [name for name in foreign(program, here) if name.partition(".")[0] in lacking]
    later = [name for name in install if items[name.partition(".")[0]].when == LATER]
    surely = [name for name in install if name not in later]
    version = next((node.facts.torch for node in nodes if node.facts.torch), "")
    if not install or not version:
        return  # without torch, no launch gets there: its refusal names all of them
    if surely:
        activated = any(node.node.activate for node in nodes)
        words = environment_words(foreign(program, here, ALWAYS), surely, version, here)
        how = "" if activated else ": launch with --activate bootstrap"
        yield f"{words}   makes an environment with them{how}"
        if later:
            named = [shlex.quote(packages.package_of(name)) for name in later]
            yield f"if it gets there, with these, too: {' '.join(named)}"
    else:
        words = environment_words(foreign(program, here), install, version, here)
        yield f"if it gets there: {words}"
    pythons = {node.facts.python for node in nodes}
    if len(pythons) == 1:
        pip = packages.pip_words(pythons.pop(), surely or install)
        yield f"or, where nodes have internet: {pip}"


def foreign(program: Program, here: Path, when: int = LATER) -> list[str]:
    """Return the modules that packages bring: not Python's, torch's or the project's own."""
    return [
        item.full if item.module == "google" else item.module
        for item in program.imports
        if item.when <= when
        and item.module not in (*sys.stdlib_module_names, *OURS, *packages.WITH_CUDA)
        and not own_place(item.module, str(here))
    ]


def whole_environment(program: Program, version: str, here: Path) -> str:
    """Return what makes an environment of all that a program imports; nothing of an unread one."""
    wanted = foreign(program, here, ALWAYS)
    if any(item.module in OURS for item in program.imports):
        wanted.append("numpy")  # of the engine
    return environment_words(wanted, wanted, version, here) if program.files else ""


def environment_words(
    wanted: Sequence[str], missing: Sequence[str], version: str, here: Path
) -> str:
    """Return what to type for an environment: of the requirements here, or of what is imported."""
    listed_here = requirements(here)
    if "torch" not in listed_here:
        return packages.bootstrap_words(wanted, version)
    more = [name for name in missing if packages.package_of(name).lower() not in listed_here]
    extra = [shlex.quote(packages.package_of(name)) for name in more]
    return " ".join([packages.BOOTSTRAP, *([REQUIREMENTS, *extra] if extra else [])])


def requirements(here: Path) -> frozenset[str]:
    """Return the names of packages in a requirements.txt here."""
    try:
        lines = (here / REQUIREMENTS).read_text(errors="replace").splitlines()[:1000]
    except OSError:
        return frozenset()
    names = [packages.NAME.match(line) for line in lines]
    return frozenset(name[0].lower() for name in names if name)


# -- paths --------------------------------------------------------------------------------------


def reads(program: Program, nodes: Sequence[ProbedNode], sent: Sent, here: Path) -> Iterator[Guess]:
    """Yield what is opened and not there, each directory once."""
    seen: dict[str, str] = {}
    for path, touch in opened(program):
        lacking = tuple(node.name for node in nodes if lacks(node, path, sent))
        if not lacking:
            continue
        directory = posixpath.dirname(path) or path
        why = why_missing(path, lacking, nodes, sent, here)
        if seen.setdefault(directory, path) == path or why.startswith("it is here"):
            shown = redacted_text(path)
            everywhere = len(lacking) == len(nodes)
            yield Guess(READS, shown, touch.file, touch.line, why, () if everywhere else lacking)


def lacks(node: ProbedNode, path: str, sent: Sent) -> bool:
    """Tell whether a path is not where the program will run on this node."""
    if node.name not in sent.nodes or path.startswith(("/", "~")):
        return path in node.facts.missing_paths
    if path in sent.paths:
        return False
    if path.startswith(".."):
        return True
    # What the node has in the directory of that path is linked in, by its outermost name.
    return path.partition("/")[0] in sent.paths or path in node.facts.missing_paths


def why_missing(
    path: str, lacking: Sequence[str], nodes: Sequence[ProbedNode], sent: Sent, here: Path
) -> str:
    below = not path.startswith(("..", "/", "~"))
    if sent.nodes and below and (here / path).exists():
        return f"it is here and does not travel; --set 'sync.include=[{path}]' sends it"
    if sent.nodes and path.startswith(".."):
        return "it is above the directory that is sent"
    if len(lacking) < len(nodes):
        return f"it is not on {listed(lacking)}"
    return "no node has it" if path.startswith(("/", "~")) or not below else "it is not there"


def writes(program: Program, sent: Sent) -> Iterator[Guess]:
    """Yield the places written to that do not come home from nodes with disks of their own."""
    seen: set[str] = set()
    for touch in program.touches if sent.nodes or sent.apart else ():
        path = normal(touch)
        why = "" if touch.how != WRITES else why_it_stays(path, sent, moves=program.moves)
        if why and not within(path, seen):
            seen.add(path)
            yield Guess(WRITES, redacted_text(path), touch.file, touch.line, why)


def why_it_stays(path: str, sent: Sent, *, moves: bool) -> str:
    """Say why a place does not come home; nothing where it does, or nobody knows."""
    if path.startswith(("/", "~")):
        return "it stays on each node"
    if moves:
        return ""
    if sent.apart:
        everywhere = "" if sent.nodes else "each node, in the directory that you have named"
        return f"it stays on {everywhere or listed(sorted(sent.apart))}"
    if path.split("/").count("..") > MOST_ABOVE:
        return "it is too far above the directory that is sent, and does not come home"
    if any(map(STAY_HIDDEN.fullmatch, path.split("/"))):
        return "such hidden files do not come home"
    return ""
