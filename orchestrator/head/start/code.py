"""Connect to the nodes and send a snapshot of this directory to those that do not share it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from orchestrator.common.errors import (
    CheckFailed,
    OrchestratorError,
)
from orchestrator.common.hosts import join_names
from orchestrator.common.program import program_at, tree_title
from orchestrator.common.text import format_bytes, plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.events import of_launch
from orchestrator.head.nodes.facts import nodes_by_value
from orchestrator.head.plan.plan import ENGINE
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen import failures
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.start.nodes import Nodes, reach_nodes
from orchestrator.head.transfer.listing import Rules
from orchestrator.head.transfer.scan import Scan, changed_error
from orchestrator.head.transfer.send import first_failed_path, send_to_all
from orchestrator.head.transfer.tree import Moved, Tree
from orchestrator.protocol.requests.transfer import STORE, CheckedOut, CheckOut, RemoteDir
from orchestrator.protocol.spec import Target
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records import experiments as experiments_on_disk

log = logging.getLogger(__name__)

# Nodes have their own copies of these directories, which ranks read. They are linked into the
# snapshot, as are those of sync.link.
INPUTS = ("data", "datasets", ".venv", "venv", "env")
# The snapshots' directory on a node, as messages show it.
HOME = "~/.orchestrator/code/snapshots"

R = TypeVar("R")


def reach_while_scanning(request: LaunchRequest) -> Nodes:
    """Connect to all nodes while the working tree is scanned, if they may need it."""
    if not needs_code(request):
        return reach_nodes(request)
    scan = begin_scan(request)
    try:
        return replace(reach_nodes(request), scan=scan)
    except BaseException:
        scan.cancel()
        raise


def send_code(request: LaunchRequest, nodes: Nodes) -> tuple[LaunchRequest, Nodes]:
    """Send the working tree to the nodes that lack it; they get its snapshot as their workdir."""
    if nodes.scan is None:
        return request, nodes
    wanted = [node for node in nodes.reached if gets_snapshot(request, node)]
    if not wanted:
        named = all(is_placed(request, node) for node in nodes.reached)
        return request, replace(nodes, scan=None if named else nodes.scan)
    request = relative_request(request)
    log.info("brings the code to %s", [node.node.name for node in wanted])
    try:
        checked = bring_code(request, wanted, len(nodes.reached), nodes.scan)
    except BaseException:
        nodes.scan.cancel()
        raise
    return request, with_snapshots(nodes, wanted, checked)


def expect_code(request: LaunchRequest, nodes: Nodes) -> tuple[LaunchRequest, Nodes]:
    """Return request and nodes as if the code had been sent (dry run); send nothing."""
    wanted = [node for node in nodes.reached if gets_snapshot(request, node)]
    if not needs_code(request) or not wanted:
        return request, nodes
    request = relative_request(request)
    tree = begin_scan(request).tree()
    about = f"{plural(tree.files, 'file')}, {format_bytes(tree.size)}"
    names = join_names([node.node.name for node in wanted])
    note = (
        f"a launch sends the code ({about}) as far as it is lacking to {names}, where it runs in a"
        " directory of its own, NAME: before that, commands cannot be pasted there"
    )
    shown = [expected_checkout(request, node) for node in wanted]
    nodes = with_snapshots(nodes, wanted, shown)
    return replace(request, notes=(*request.notes, note, *tree.notes)), nodes


def expected_checkout(request: LaunchRequest, node: Reached) -> CheckedOut:
    """Return the answer that a node would give to a checkout, with NAME as the snapshot's name."""
    target = request.target
    if target.kind == "auto" and not (request.directory / target.name).exists():
        # The target is a command that the node has installed.
        target = node.facts.target
    elif target.kind == "auto":
        target = Target(*program_at(target.name, str(request.directory)))
    workdir = f"{HOME}/NAME/{tree_title(str(request.directory))}"
    return CheckedOut(workdir=workdir, own=(), target=target, disk=node.facts.disk)


# -- the nodes that get a snapshot ------------------------------------------------------------


def needs_code(request: LaunchRequest) -> bool:
    """Return True if a launch uses files of this directory on the nodes."""
    config = request.config
    if request.origin:
        return True
    if config.launch.sync == "off":
        return False
    if request.payload is not None or request.target.kind != "engine":
        return True
    targets = (config.model.target, config.dataset.target, config.training.loss)
    return request.target.name == ENGINE and any(targets)


def is_placed(request: LaunchRequest, node: Reached) -> bool:
    """Return True if the user named the directory where this node finds its code."""
    return bool(node.node.workdir or request.config.launch.workdir)


def gets_snapshot(request: LaunchRequest, node: Reached) -> bool:
    if request.config.launch.sync == "always" or request.origin:
        return True
    return not is_placed(request, node) and not node.facts.sees_directory


def relative_request(request: LaunchRequest) -> LaunchRequest:
    """Return the request with the program's path relative to this directory, as in a snapshot.

    Nodes with workdir= then have the program at that path below it.
    """
    target, path = request.target, Path(request.target.name)
    if target.kind != "auto" or not path.is_relative_to(request.directory):
        return request
    below = str(path.relative_to(request.directory))
    return replace(request, target=target.replace(name=below))


# -- the tree ---------------------------------------------------------------------------------


def begin_scan(request: LaunchRequest) -> Scan:
    """Start to scan the working tree; the program's file is included in any case."""
    sync, path = request.config.sync, Path(request.target.name)
    below = not path.is_absolute() and ".." not in path.parts
    is_file = below and request.target.kind in ("auto", "script", "program")
    rules = Rules(
        largest_file=sync.largest_file,
        largest_tree=sync.largest_tree,
        include=sync.include,
        exclude=sync.exclude,
        apart=(
            *experiments_below(request),
            *(os.fsencode(name) for name in output_paths(request) if not name.startswith("..")),
            *secret_files(request),
        ),
        everything=request.origin is not None,
        always=(os.fsencode(path),) if is_file and (request.directory / path).is_file() else (),
    )
    scan = Scan(os.fsencode(request.directory), rules)
    if is_of_user(request):
        scan.cancel()
    return scan


def is_of_user(request: LaunchRequest) -> bool:
    """Return True for a function that is launched from / or the home directory."""
    return request.payload is not None and request.directory in (Path("/"), Path.home())


def experiments_below(request: LaunchRequest) -> Iterator[bytes]:
    """Yield the relative paths of experiment directories below this directory."""
    here, root = request.directory, request.where.experiments.absolute()
    yield b"experiments"
    if root == here:
        yield from (os.fsencode(path.parent.name) for path in here.glob("*/job.json"))
    elif root.is_relative_to(here):
        yield os.fsencode(root.relative_to(here))


def output_paths(request: LaunchRequest) -> list[str]:
    """Return the directories that the program writes into; they are not sent."""
    names = [name.strip("/") for name in request.config.sync.outputs]
    checkpoints = request.config.checkpoint.directory
    if request.target.name == ENGINE and checkpoints and not checkpoints.startswith(("/", "~")):
        names.append(os.path.normpath(checkpoints))
    return names


def secret_files(request: LaunchRequest) -> Iterator[bytes]:
    """Yield the secret files below this directory, by their path and their resolved path."""
    here = request.directory
    for path in request.secret_files:
        for place in (path, path.resolve()):
            if place.is_relative_to(here):
                yield os.fsencode(place.relative_to(here))


# -- to the nodes -----------------------------------------------------------------------------


def bring_code(
    request: LaunchRequest, wanted: Sequence[Reached], total: int, scan: Scan
) -> list[CheckedOut]:
    """Send the tree, check out a snapshot on each node, and report it."""
    tree = tree_for(request, scan)
    checked, sent = deliver_code(request, wanted, tree, total)
    report_code(wanted, checked, tree, sent)
    if not experiments_on_disk.list_experiments(request.where):
        tell(of_launch.RunsInCopy(checked[0].workdir))
    return checked


def tree_for(request: LaunchRequest, scan: Scan) -> Tree:
    """Wait for the scan and return its tree; a function gets an empty tree if it fails."""
    why: CheckFailed | str = f"{request.directory} holds more of yours than code"
    try:
        if not is_of_user(request):
            return scan.tree()
    except CheckFailed as error:
        if request.payload is None:
            raise
        why = error
    note = f"warning: the function goes without its directory: {why}"
    return Tree.of(scan.directory, (), (note,))


def deliver_code(
    request: LaunchRequest, wanted: Sequence[Reached], tree: Tree, total: int
) -> tuple[list[CheckedOut], list[Moved]]:
    """Send each node the files it lacks, then check out its snapshot; `total` counts all nodes."""
    beside = str(request.origin.directory if request.origin else request.directory)
    question = CheckOut(
        tree=tree.digest,
        snapshot=secrets.token_hex(4),
        title=tree_title(beside),
        beside=beside,
        outputs=tuple(output_paths(request)),
        inputs=(*INPUTS, *request.config.sync.link),
        target=request.target,
    )
    channels = [node.channel for node in wanted]
    with ProgressBar("sending the code", tree.size * len(wanted)) as progress:
        places = [RemoteDir(kind=STORE)] * len(wanted)
        results = send_to_all(channels, places, tree, progress.add)
    if changed := first_failed_path(results):
        raise changed_error(os.fsencode(changed))
    sent = all_of(wanted, results, total)
    answers = fleet.ask_nodes(wanted, [question] * len(wanted), FILES_ANSWER_SECONDS)
    checked = all_of(wanted, answers, total)
    refuse_strange(wanted, checked, beside)
    return checked, sent


def all_of(
    nodes: Sequence[Reached], results: Sequence[R | OrchestratorError], total: int
) -> list[R]:
    """Return the results, or raise one error that names every node that failed."""
    then = "; nothing was started"
    return failures.results_or_error([node.node for node in nodes], results, then, total)


def refuse_strange(wanted: Sequence[Reached], checked: Sequence[CheckedOut], where: str) -> None:
    """Raise if a node's Python would import an editable install instead of the snapshot."""
    strange = dict.fromkeys(name for answer in checked for name in answer.strange)
    if strange:
        who = join_names([n.node.name for n, a in zip(wanted, checked, strict=True) if a.strange])
        raise CheckFailed(
            f"the Python of {who} imports {join_names([*strange])} from its own {where} (an"
            " editable install), instead of what is sent there",
            f"remove it: orchestrator exec -- pip uninstall -y {next(iter(strange))}; or run the"
            " nodes' own code: --sync off",
        )


def report_code(
    wanted: Sequence[Reached], checked: Sequence[CheckedOut], tree: Tree, sent: Sequence[Moved]
) -> None:
    """Report which files were sent to which nodes, and which of their directories are linked in."""
    files = max((len(each.files) for each in sent), default=0)
    updates = (
        f"; {plural(files, 'file')} sent, {format_bytes(max(s.size for s in sent))}"
        if files
        else ""
    )
    where, names = os.fsdecode(tree.directory), [node.node.name for node in wanted]
    size = f"{plural(tree.files, 'file')}, {format_bytes(tree.size)}"
    tell(of_launch.CodeSent(tree.digest[:12], size, join_names(names), updates))
    for note in tree.notes:
        tell(of_launch.CodeNote(note))
    linked = nodes_by_value(zip(names, (answer.own for answer in checked), strict=True))
    for own, nodes in linked.items():
        if own:
            tell(of_launch.FilesLinked(where, join_names(own), join_names(nodes)))
    if any(answer.installed for answer in checked):
        tell(of_launch.CopyImported(where))


def with_snapshots(nodes: Nodes, wanted: Sequence[Reached], checked: Sequence[CheckedOut]) -> Nodes:
    """Return the nodes with their snapshots as working directories."""
    new = {}
    for node, answer in zip(wanted, checked, strict=True):
        facts = node.facts.replace(
            workdir=answer.workdir, workdir_exists=True, target=answer.target, disk=answer.disk
        )
        new[id(node)] = replace(node, facts=facts)
    return replace(nodes, reached=tuple(new.get(id(node), node) for node in nodes.reached))
