"""`orchestrator exec` and `ssh`: everyday work on the nodes of the list."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from orchestrator.common import interrupt
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE,
    EXIT_STOPPED,
    CheckFailed,
    UsageError,
)
from orchestrator.common.hosts import join_names
from orchestrator.config.launch import Where
from orchestrator.config.parse import waiting_time
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.exec.execution import (
    Directory,
    ExecOutcome,
    Execution,
    Sink,
    plain_line,
    shell_line,
    ssh_command,
)
from orchestrator.head.nodes.node_list import (
    NumberedNode,
    choose_nodes,
    indices_in_words,
    read_nodes,
)
from orchestrator.head.screen import failures, output, styles
from orchestrator.head.screen.lines import LineSplitter

# A shell reports a process that SIGPIPE ended by this exit code.
OUTPUT_CLOSED = 128 + signal.SIGPIPE
STOPPED = "you stopped it"


@dataclass(frozen=True)
class Chosen:
    """The nodes that a command is about, and how they are reached."""

    where: Where
    # Numbers or names; an empty tuple selects all nodes.
    nodes: tuple[str, ...] = ()
    connect_timeout: float = 10.0
    strict_host_keys: bool = False

    def numbered(self) -> list[NumberedNode]:
        return choose_nodes(read_nodes(self.where.node_list), self.nodes)

    def transport(self) -> SshTransport:
        config = SshConfig(self.where.ssh_config)
        return SshTransport(config, timeout=self.connect_timeout, strict=self.strict_host_keys)


def directory_on(node: NumberedNode, wanted: str | None) -> Directory:
    """Return where a program runs: --workdir, or the node's, or the same directory as here."""
    if wanted is not None:
        if wanted != "~" and not wanted.startswith(("/", "~/")):
            raise UsageError(
                f"--workdir {wanted} is relative, and nodes have no current directory",
                f"write it in full, such as --workdir {Path.cwd() / wanted} or ~/{wanted}",
            )
        return Directory(wanted, needed=True)
    if node.node.workdir is not None:
        return Directory(node.node.workdir, named=True)
    return Directory(str(Path.cwd()))


# -- exec -----------------------------------------------------------------------------------------


def run_on_nodes(
    chosen: Chosen,
    words: tuple[str, ...],
    workdir: str | None,
    limit: float | None,
    *,
    fold: bool,
) -> int:
    """Run a command on all nodes at once; show what it prints, and the exit codes at the end."""
    if fold and output.as_json():
        raise UsageError("--fold cannot be combined with --json", "give one of them")
    if limit is not None:
        waiting_time("--timeout", limit)
    nodes = chosen.numbered()
    shown = PrefixedOutput([node.index for node in nodes])
    kept: dict[tuple[int, bool], Stream] = {}

    def sink_of(node: NumberedNode, errors: bool) -> Sink:
        if output.as_json() or (fold and not errors):
            return kept.setdefault((node.index, errors), Stream())
        return shown.stream(node.index, errors=errors)

    def line_of(node: NumberedNode) -> str:
        return shell_line(words, directory_on(node, workdir))

    execution = Execution(chosen.transport(), nodes, line_of, sink_of, limit=limit)
    shown.when_broken = lambda: execution.end("its output is closed")
    stopped = answer_interrupts(execution)
    outcomes = execution.go()
    code = EXIT_STOPPED if stopped else OUTPUT_CLOSED if shown.broken else exit_code(outcomes)
    if output.as_json():
        data = [as_json(outcome, kept) for outcome in outcomes]
        output.print_result({"nodes": data, "exit_code": code}, indent=None)
        return code
    for heading, text in folded(nodes, kept):
        output.write_out(output.paint_text(heading, styles.STRONG, output.terminal_of()))
        output.write_out(text)
    if code not in (EXIT_DONE, OUTPUT_CLOSED):
        output.complain(summary(outcomes))
    return code


def answer_interrupts(execution: Execution) -> list[int]:
    """End the programs at the first Ctrl-C, exit at the second; return the list of signals."""
    came: list[int] = []

    def answer(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            # The programs end with their connections, so leaving at once is safe.
            interrupt.exit_at_once(EXIT_STOPPED)
        execution.end(STOPPED)

    for number in interrupt.SIGNALS:
        signal.signal(number, answer)
    return came


def exit_code(outcomes: Sequence[ExecOutcome]) -> int:
    """Return 0 where all are 0, 4 if a node could not be reached or was lost, else 1."""
    if any(outcome.lost for outcome in outcomes):
        return EXIT_NODE
    return EXIT_DONE if all(outcome.code == 0 for outcome in outcomes) else EXIT_FAILED


def summary(outcomes: Sequence[ExecOutcome]) -> str:
    """Return the table of exit codes, with one row for equal outcomes; success is the last row."""
    alike = failures.group_errors(
        (each.node, (each.code, each.problem), each.fix) for each in outcomes
    )
    rows: list[list[output.Cell]] = [["NODE", "NAME", "EXIT CODE", ""]]
    for (code, about), fix, nodes in sorted(alike, key=lambda kind: kind[0][0] == 0):
        painted = "0" if code == 0 else ("-" if code is None else str(code), styles.FAILED)
        numbers, names = zip(*((node.index, node.node.name) for node in nodes), strict=True)
        rows.append([indices_in_words(numbers), join_names(names), painted, about])
        rows += [["", "", "", f"-> {fix}"]] * bool(fix)
    return output.format_table(rows, output.terminal_of(sys.stderr), headed=True)


# -- ssh ------------------------------------------------------------------------------------------


def replace_by_ssh(chosen: Chosen, words: tuple[str, ...], workdir: str | None) -> NoReturn:
    """Replace this process by ssh, with a shell or a program on one node."""
    targets = chosen.numbered()
    if len(targets) > 1:
        names = ", ".join(f"{target.index} is {target.node.name}" for target in targets)
        raise UsageError(f"{chosen.nodes[0]} names several nodes", f"give a number: {names}")
    (target,) = targets
    line = plain_line(directory_on(target, workdir), words)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal and not words:
        output.complain(f"orchestrator: {target.label} is {target.node.name}")
    command = ssh_command(
        target,
        line,
        config=chosen.where.ssh_config,
        timeout=chosen.connect_timeout,
        strict=chosen.strict_host_keys,
        terminal=terminal,
    )
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise CheckFailed(
            "the ssh program is needed for this, and is not installed here",
            "install it (Debian, Ubuntu: apt-get install openssh-client)",
        ) from None


# -- what the nodes print --------------------------------------------------------------------------


class Stream:
    """Stores the output of one program on one of its streams."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        """Keep the data; as_json() and folded() read them at the end."""


# By the node's number, and whether it is standard error.
Streams = Mapping[tuple[int, bool], Stream]


def folded(nodes: Sequence[NumberedNode], streams: Streams) -> Iterator[tuple[str, str]]:
    """Yield each different output once, with a heading that names its nodes."""
    groups: dict[bytes, list[NumberedNode]] = {}
    for node in sorted(nodes, key=lambda node: node.index):
        stream = streams.get((node.index, False))
        if stream is not None and stream.data:
            groups.setdefault(bytes(stream.data), []).append(node)
    for data, group in groups.items():
        names = indices_in_words([node.index for node in group])
        heading = f"--- {names} ({join_names([node.node.name for node in group])})"
        yield heading, data.decode("utf-8", "replace")


def as_json(outcome: ExecOutcome, streams: Streams) -> dict[str, Any]:
    """Return how a command ended on a node, and what it printed."""
    index = outcome.node.index
    shown: dict[str, Any] = {
        "node": index,
        "name": outcome.node.node.name,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 3),
        "problem": outcome.problem,
        "fix": outcome.fix,
    }
    for name, errors in (("stdout", False), ("stderr", True)):
        stream = streams.get((index, errors)) or Stream()
        shown[f"{name}_bytes"] = len(stream.data)
        shown[name] = stream.data.decode("utf-8", "replace")
    return shown


# -- prefixed -----------------------------------------------------------------------------------
# Shows what programs on several nodes print, line by line, each with its node's prefix.


class PrefixedOutput:
    """The two streams of a terminal or of pipes, and the nodes whose lines go there."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.width = max((len(f"node{node}") for node in nodes), default=0)
        # Set once the reader of stdout has closed it, as `| head` does.
        self.broken = False
        self.when_broken: Callable[[], None] = lambda: None
        self.turn = threading.Lock()
        self.colored = {out: styles.colors_shown(out) for out in (sys.stdout, sys.stderr)}

    def stream(self, node: int, *, errors: bool) -> PrefixedStream:
        return PrefixedStream(self, node, sys.stderr if errors else sys.stdout)

    def write(self, text: str, out: TextIO) -> None:
        with self.turn:
            if text and not self.broken and not output.pass_on(text, out):
                self.broken = True
                self.when_broken()


class PrefixedStream:
    """The output of one program on one of its streams."""

    def __init__(self, whole: PrefixedOutput, node: int, out: TextIO) -> None:
        self.whole, self.out = whole, out
        color = whole.colored[out]
        self.splitter = LineSplitter(color)
        prefix = f"node{node}".ljust(whole.width) + " | "
        self.prefix = (
            f"\x1b[{styles.OF_NODES[node % len(styles.OF_NODES)]}m{prefix}\x1b[0m"
            if color
            else prefix
        )

    def write(self, data: bytes) -> None:
        self._show(self.splitter.feed(data))

    def close(self) -> None:
        """Show the last line if it has no newline."""
        self._show(self.splitter.flush())

    def _show(self, lines: list[str]) -> None:
        if lines:
            text = self.prefix + f"\n{self.prefix}".join(lines) + "\n"
            self.whole.write(text, self.out)
