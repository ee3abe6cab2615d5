"""Find the one cause among the failures of many nodes: its node, rank and line. Pure functions."""

from __future__ import annotations

import re
import signal
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from orchestrator.common.text import plural
from orchestrator.head.follow import failure_kinds
from orchestrator.head.nodes import facts
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import printable_text
from orchestrator.node.job.hang import TIMED_OUT
from orchestrator.node.machine import nvidia
from orchestrator.protocol.events import Ended, RankEnded, RankError
from orchestrator.protocol.facts import Xid
from orchestrator.records.experiment import NodeRecord
from orchestrator.records.outcome import Cause, JobVerdict

FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:,? in (\S+))?', re.MULTILINE)
PACKAGES = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.]\d+/|^<|/orchestrator/node/job/.*[.]py$"
    r"|/(site|user)customize[.]py$|torchinductor"
)
IN_A_WORKER = re.compile(r"^Caught \w+ (in DataLoader worker process \d+)")
# The cause of "DataLoader worker (pid(s) 7) exited unexpectedly", which names the signal.
WORKER_KILLED = re.compile(r"^RuntimeError: DataLoader worker .* is killed by signal: \w+", re.M)
# The first exception of a group: in its traceback each stands behind a bar.
IN_A_GROUP = re.compile(r"^ *\| +File .*\n(?: *\|  +.*\n)* *\| (\S.*)$", re.MULTILINE)
# The errors of the Trainer and of our helpers: what happened, and below it what to type.
OF_OURS = re.compile(r"^orchestrator\.common\.errors\.\w+: (?=[^\n]*\n  )", re.MULTILINE)
# Torch begins each line of a rank's traceback with this prefix.
OF_A_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
WHAT = re.compile(r"^\s*what\(\):\s+(.+)$", re.MULTILINE)
# OpenMP runtimes print this before they end the process.
NO_THREAD = re.compile(r"^(?:libgomp: Thread creation failed|OMP: System error #11\b).*", re.M)
# A GPU kernel prints this once for each thread whose assertion fails.
ON_GPU = re.compile(r"(\S+): block: \[[\d,]+\], thread: \[[\d,]+\] Assertion `(.+?)` failed")
TRACEBACK = "Traceback (most recent call last):"
# Messages with one of these beginnings need no title.
SAYS_ALL = ("ended with exit code", "no progress")
LINE_OF_FILE = re.compile(r"([^/]+:\d+)(?: in \S+)?$")
# The markers below a line of a traceback.
MARKS = re.compile(r"\s*[~^]+\s*")
# The most characters that are shown of a message and of a line.
LONGEST_MESSAGE, LONGEST_LINE = 600, 500
# The most lines of a message that are shown below a shortened traceback.
MESSAGE_LINES = 3
Paint = Callable[[str, str], str]
# The reasons of a stop, as sent to the nodes and written to job.json.
STOPPED_BY_USER, KILLED_BY_USER = "stopped by the user", "killed by the user"
# The distance of a failure from the cause: the smaller, the nearer.
OWN, NODE, EARLY, APART, LEFT = range(5)


@dataclass(frozen=True)
class Failure(Cause):
    """A failure that a node reports, with the evidence to tell a cause from a consequence."""

    # Further output of the rank from which the kind is derived.
    evidence: str = ""

    @property
    def terminated(self) -> bool:
        """Return True if SIGTERM from outside ended the rank."""
        return self.kind == "signal" and "(SIGTERM)" in self.message

    @property
    def certain(self) -> bool:
        """Return True for SIGKILL to a rank: no failure elsewhere can cause it."""
        killed = self.kind in ("signal", "out_of_memory") and "(SIGKILL)" in self.message
        return self.rank is not None and (killed or self.kind == "memory_floor")

    @property
    def distance(self) -> int:
        """Return the distance from the cause; a report that a peer is gone is far from it."""
        text = f"{self.message}\n{self.evidence}"
        if self.kind == "ended_early":
            return EARLY
        may_echo = self.kind in ("exception", "communication", "exit", "signal", "torchrun")
        if (
            may_echo
            and re.search(failure_kinds.ECHO, text)
            and not re.search(failure_kinds.OWN_NETWORK, text)
        ):
            return APART if re.search(failure_kinds.NEVER_MET, text) else LEFT
        return NODE if self.kind in ("torchrun", "supervisor") else OWN

    @property
    def echo(self) -> bool:
        return self.distance in (APART, LEFT)

    @property
    def who(self) -> str:
        return place_of(self.rank, self.node, self.node_name)


# -- one failure ------------------------------------------------------------------------------


def failure_of_rank(node: int, name: str, event: RankEnded, exit_text: str = "") -> Failure:
    """Return the failure of a rank; `exit_text` is the argument that it gave to sys.exit."""
    code, error = event.code, event.error
    where = f"{error.file}:{error.line} in {error.function}" if error and error.file else ""
    begun = Failure(node, name, event.rank, event.time, "exit", "", where=where)
    # An exception that a forked child of the rank left does not explain a signal to the rank.
    if error and error.type != "SystemExit" and (code >= 0 or error.pid == event.pid):
        failure = _of_exception(begun, event, error)
    elif code < 0:
        failure = _of_signal(begun, event, -code)
    else:
        failure = _of_exit(begun, event, exit_text)
    return _with_the_drivers_words(failure, event.driver)


def _with_the_drivers_words(failure: Failure, driver: Sequence[str]) -> Failure:
    """Return the failure with the driver's report: as a GPU fault if fatal, else in the message."""
    xids = nvidia.find_xids("\n".join(driver))
    xid = next((each for each in xids if each.fatal), None)
    if xid is not None and re.search(
        failure_kinds.OF_GPUS, f"{failure.message}\n{failure.evidence}"
    ):
        return _blamed_on_gpu(failure, xid, "the rank says")
    if xids and failure.kind == "gpu_error":
        return replace(failure, message=f"{failure.message}; the driver says: {xids[-1]}")
    return failure


def _of_exception(begun: Failure, event: RankEnded, error: RankError) -> Failure:
    text, trace = error.message, error.traceback
    message = describe_exception(error.type, text, trace)
    where = begun.where
    evidence = "\n".join([message, *last_lines(trace)])
    if error.type in ("SyntaxError", "IndentationError", "TabError"):
        where = users_line(trace) or where
    if TRACEBACK in text:
        # The text is the traceback of a child process, which names the line that failed.
        where = users_line(text) or where
    worker = IN_A_WORKER.match(text)
    if worker:
        message = f"{(last_lines(text) or [message])[-1]} ({worker[1]})"
        evidence = "\n".join([message, *last_lines(text)])
    kind = failure_kinds.kind_of_text(evidence) or failure_kinds.kind_of_trace(trace) or "exception"
    if event.oom_kills and re.search(failure_kinds.HELPER_DIED, evidence):
        kind = "out_of_memory"
        message += "; the kernel's out-of-memory killer was at work on this node"
    if kind == "gpu_error":
        false = ON_GPU.search(event.said)
        message = first_line(message) + (f": {false[2]} is false in {false[1]}" if false else "")
    fix = ""
    if kind == "exception" and OF_OURS.search(trace):
        # Our own errors have the fix on the lines below the message.
        message, _, fix = text.partition("\n")
        fix = printable_text(" ".join(fix.split()))[:LONGEST_MESSAGE]
    if kind == "exception" and re.search(failure_kinds.HELPER_DIED, evidence):
        fix = failure_kinds.HELPER_FIX
    failure = replace(
        begun, time=error.time, kind=kind, message=message, evidence=evidence, fix=fix
    )
    return replace(failure, traceback=trace, where=where)


def _blamed_on_gpu(failure: Failure, xid: Xid, who: str) -> Failure:
    message = f"{xid}; {who}: {first_line(failure.message)}"
    fix = (
        f"# before {failure.node_name} in the node list keeps jobs off;"
        f" {failure_kinds.fix_of('gpu_fault')}"
    )
    return replace(failure, kind="gpu_fault", message=message, fix=fix)


def describe_exception(kind: str, text: str, trace: str) -> str:
    """Return the text of an exception, or of the one inside it if that says more."""
    if text.startswith("\n"):
        # The exception of mp.spawn has the traceback of the process that failed.
        return f"{kind}: {(last_lines(text) or [text.strip()])[-1]}"
    if TRACEBACK in text:
        # The exception of torch.distributed.checkpoint has the traceback of another rank.
        return f"{kind}: {first_line(text)}: {(last_lines(text) or [''])[-1]}"
    group = trace.partition("- 1 ---")[2] if "sub-exception" in first_line(text) else ""
    inside = IN_A_GROUP.search(group)
    if inside:
        return f"{kind}: {text}: {inside[1]}"
    killed = WORKER_KILLED.search(trace) if "exited unexpectedly" in text else None
    if killed:
        return killed[0]
    return f"{kind}: {text}" if text else kind


def _of_signal(begun: Failure, event: RankEnded, number: int) -> Failure:
    name, output = signal_name(number), OF_A_RANK.sub("", event.said)
    message, kind, evidence = f"killed by signal {number} ({name})", "signal", ""
    if event.memory:
        kind, message = "memory_floor", event.memory
    elif name == "SIGKILL" and event.oom_kills:
        kind = "out_of_memory"
        peak = f" (its peak was {event.peak_kb / 2**20:.1f} GiB)" if event.peak_kb else ""
        message += f": the kernel's out-of-memory killer was at work on this node{peak}"
    elif name == "SIGBUS" and event.shm_full:
        kind = "shared_memory"
        message += ": /dev/shm is full on this node"
    elif name == "SIGABRT":
        what = WHAT.findall(output) or NO_THREAD.findall(output)
        message += f": {what[-1]}" if what else ""
        evidence = output.partition("Fatal Python error")[0]
        kind = failure_kinds.kind_of_text("\n".join(what)) or kind
    where = users_line(output.rpartition("(most recent call first)")[2], innermost_first=True)
    return replace(begun, kind=kind, message=message, evidence=evidence, where=where)


def _of_exit(begun: Failure, event: RankEnded, exit_text: str) -> Failure:
    code, output = event.code, OF_A_RANK.sub("", event.said)
    if exit_text and not exit_text.lstrip("-").isdigit():
        first, _, rest = exit_text.partition("\n")
        # Our own errors have the fix on indented lines below the message.
        fix = rest.strip() if rest.startswith("  ") else ""
        kind = failure_kinds.kind_of_text(exit_text) or "exit"
        fix = fix or ("the program says so itself, with sys.exit" if kind == "exit" else "")
        return replace(begun, kind=kind, message=first, evidence=exit_text, fix=fix)
    message = f"ended with exit code {code}"
    if code > 128 and signal_name(code - 128) != "unknown":
        message += f", as after {signal_name(code - 128)}"
    trace = TRACEBACK + output.rpartition(TRACEBACK)[2] if TRACEBACK in output else ""
    last = last_lines(trace) or NO_THREAD.findall(output)
    if not last:
        return replace(
            begun,
            message=message,
            fix="see why the program ends itself there, with sys.exit" * bool(begun.where),
        )
    message += f", after {last[0]}"
    kind = failure_kinds.kind_of_text(last[0]) or failure_kinds.kind_of_trace(trace) or "exit"
    failure = replace(begun, kind=kind, message=message, evidence=last[0])
    return replace(failure, traceback=trace, where=users_line(trace) or begun.where)


def failure_of_torchrun(node: int, name: str, event: Ended) -> Failure:
    """Return the failure of torchrun on a node where no rank had failed."""
    output, code = event.said, event.agent
    trace = TRACEBACK + output.rpartition(TRACEBACK)[2] if TRACEBACK in output else output
    last = last_lines(trace)
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was killed by signal {-code} ({signal_name(-code)})"
    begun = Failure(node, name, None, event.time, "torchrun", f"torchrun {how}")
    if code == -signal.SIGKILL and event.oom_kills:
        reason = ": the kernel's out-of-memory killer was at work on this node"
        return replace(begun, kind="out_of_memory", message=begun.message + reason)
    # The output does not explain a SIGKILL.
    if not last or code == -signal.SIGKILL:
        return begun
    message = f"{begun.message}: {last[-1]}"
    kind = failure_kinds.kind_of_text(last[-1]) or failure_kinds.kind_of_trace(trace) or "torchrun"
    return replace(begun, kind=kind, message=message, evidence=last[-1])


def place_of(rank: int | None, node: int | None, name: str = "", otherwise: str = "the job") -> str:
    """Return the rank and node of a failure as text, `otherwise` if it has no node."""
    if node is None:
        return otherwise
    where = f"node {node} ({name})" if name else f"node {node}"
    return where if rank is None else f"rank {rank} on {where}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def last_lines(trace: str) -> list[str]:
    """Return the lines of a traceback that name the exceptions of the chain."""
    lines = [line for line in trace.splitlines() if line[:1].strip()]
    return [line for line in lines if not line.startswith(("Traceback ", "The above ", "During "))]


def users_line(trace: str, *, innermost_first: bool = False) -> str:
    """Return `file:line in function` of the innermost frame outside of packages."""
    frames = [match for match in FRAME.finditer(trace) if not PACKAGES.search(match[1])]
    if not frames:
        return ""
    file, line, function = frames[0 if innermost_first else -1].groups()
    return f"{file}:{line}" + (f" in {function}" if function else "")


# -- of all failures --------------------------------------------------------------------------


def find_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the earliest failure nearest to the cause, or the first reported one if alike."""
    # A rank that ended early without an error explains only failures of ranks that lost their
    # connection to it. On a busy machine its end may be seen long after the connections closed.
    missed = any(f.distance > EARLY for f in failures)
    known = [f for f in failures if f.distance != EARLY or missed]
    first = min(known, key=lambda failure: (failure.distance, failure.time), default=None)
    if first is None:
        return None
    # If all ranks fail alike, return the one that the screen has already named.
    what = (OWN, first.kind, first.message)
    return next((f for f in known[:1] if (f.distance, f.kind, f.message) == what), first)


def blame_silent_node(
    failures: Sequence[Failure], silent: Sequence[tuple[int, str]]
) -> Sequence[Failure]:
    """Return the failures with losses attributed to the node that is out of reach.

    When two nodes lose each other, each reports the other as lost. The one that has ended its
    part properly is not the lost one.
    """
    numbers = [node for node, _ in silent]
    return [
        replace(failure, node=silent[0][0], node_name=silent[0][1])
        if silent and failure.kind == "lost" and failure.node not in numbers
        else failure
        for failure in failures
    ]


def blame_still_node(
    failures: Sequence[Failure], still: Sequence[tuple[int, str, float]]
) -> list[Failure]:
    """Return the failures with losses attributed to the node whose supervisor did not run.

    `still`: (index, name, seconds) of nodes whose supervisor was stopped or had no CPU.
    """
    node, name, seconds = max(still, key=lambda one: one[2])
    reason = f"its supervisor did not run for {seconds:.0f} s"
    return [
        replace(failure, node=node, node_name=name, message=f"{reason}: {failure.message}")
        if failure.kind == "lost"
        else failure
        for failure in failures
    ]


def blame_late_rank(failures: Sequence[Failure], late: Failure) -> list[Failure]:
    """Return the failures with collectives that timed out attributed to the rank that was late."""
    return [
        replace(
            late, time=failure.time, message=f"{late.message}; {failure.who}: {failure.message}"
        )
        if TIMED_OUT.search(text := f"{failure.message}\n{failure.evidence}\n{failure.traceback}")
        and re.search(failure_kinds.DISTRIBUTED, text)
        else failure
        for failure in failures
    ]


def blame_broken_gpu(failures: Sequence[Failure], node: int, name: str, xid: Xid) -> list[Failure]:
    """Return the failures with hangs and lost connections attributed to the broken GPU.

    A rank whose GPU no longer answers may hang, and then only the other ranks fail.
    """
    return [
        _blamed_on_gpu(replace(failure, node=node, node_name=name, rank=None), xid, failure.who)
        if failure.kind == "hang" or failure.echo
        else failure
        for failure in failures
    ]


def is_of_ranks(failure: Failure) -> bool:
    """Return True if the broken connection was between ranks, not the program's own."""
    text = f"{failure.message}\n{failure.evidence}\n{failure.traceback}"
    broken = re.search(failure_kinds.BROKEN, failure.message.lower())
    return bool(broken and re.search(failure_kinds.DISTRIBUTED, text))


def conclude_verdict(failures: Sequence[Failure], ended_badly: int) -> JobVerdict | None:
    """Return the verdict for job.json: the cause, ranks that failed alike, and consequences."""
    first = find_cause(failures)
    if first is None:
        return None
    if first.distance == LEFT and is_of_ranks(first):
        first = replace(first, kind="link")
    first_failures = {
        f.rank: f for f in failures if f.distance == OWN and f.rank not in (None, first.rank)
    }
    message = first.message if first.distance == OWN else None
    same = [f for f in first_failures.values() if f.message == message]
    also = [f for f in first_failures.values() if f.message != message]
    if re.search(failure_kinds.HIDES, first.message) or re.search(
        failure_kinds.OWN_FILE, first.message
    ):
        first = replace(first, kind="exception")
    elif (
        same
        and not also
        and ended_badly <= len(first_failures) + 1
        and facts.is_package_missing(first.message)
    ):
        # A package that all nodes lack is no machine's fault: no node is blamed or replaced.
        fix = facts.how_to_get_package(first.message, everywhere=True)
        first = replace(first, kind="exception", fix=fix)
    elif first.kind == "environment" and facts.is_package_missing(first.message):
        first = replace(first, fix=facts.how_to_get_package(first.message, everywhere=False))
    known = len(first_failures) + (first.rank is not None and first.kind != "ended_early")
    of_first = {field.name: getattr(first, field.name) for field in fields(Cause)}
    # Reports and notifications cannot show terminal colors.
    of_first["message"] = printable_text(first.message)
    of_first["fix"] = first.fix or failure_kinds.fix_of(first.kind, first.message)
    line = LINE_OF_FILE.search(first.where)
    if of_first["fix"] == failure_kinds.FIX_IT and line:
        of_first["fix"] = f"fix {line[1]}"
    return JobVerdict(
        **of_first,
        title=failure_kinds.title_of(first.kind),
        same=tuple(sorted(f.rank for f in same if f.rank is not None)),
        also=tuple(
            Cause(rank=f.rank, node=f.node, message=printable_text(first_line(f.message)))
            for f in also
        ),
        others=max(0, ended_badly - known),
    )


def stopped_verdict(reason: str, time: float) -> JobVerdict:
    return _without_a_node("stopped", reason, time)


def unstarted_verdict(
    reason: str, time: float, fix: str = "", unable: Sequence[NodeRecord] = ()
) -> JobVerdict:
    """Return the verdict on an attempt that could not start; `unable` are the nodes at fault."""
    cause = _without_a_node(failure_kinds.kind_of_text(reason) or "start", reason, time)
    cause = replace(cause, fix=fix or cause.fix)
    if not unable:
        return cause
    first, *others = unable
    also = tuple(Cause(node=node.index, message="also its part") for node in others)
    return replace(cause, node=first.index, node_name=first.name, also=also)


def _without_a_node(kind: str, message: str, time: float) -> JobVerdict:
    title, fix = failure_kinds.title_of(kind), failure_kinds.fix_of(kind)
    return JobVerdict(time=time, kind=kind, message=message, title=title, fix=fix)


def verdict_to_lines(
    verdict: JobVerdict, logs: str = "", paint: Paint = lambda text, _: text
) -> list[str]:
    """Return the verdict as lines for the screen; `logs` is the command for the rank's log."""
    without_node = "the job" if verdict.kind == "hang" else "the head"
    who = place_of(verdict.rank, verdict.node, verdict.node_name, without_node)
    at = clock.strftime("%H:%M:%S", clock.localtime(verdict.time))
    what = first_line(verdict.message)
    what = what if len(what) <= LONGEST_MESSAGE else what[: LONGEST_MESSAGE - 1] + "…"
    title = "" if what.startswith(SAYS_ALL) or verdict.kind == "exception" else f"{verdict.title}: "
    cause = paint("the cause:", styles.FAILED)
    lines = [f"{cause} {who}, {at}: {title}{paint(what, styles.STRONG)}"]
    if verdict.where:
        lines.append(f"  at {verdict.where}")
    if verdict.same:
        lines.append(f"  the same on {in_words(verdict.same)}")
    for other in verdict.also[:3]:
        where = place_of(other.rank, other.node)
        lines.append(f"  {where} failed by itself too: {other.message[:LONGEST_LINE]}")
    if verdict.others:
        lines.append(f"  {plural(verdict.others, 'other rank')} failed as a consequence")
    if logs:
        lines.append(f"  full log: {logs}")
    return (
        [*lines, f"{paint('what to do:', styles.STRONG)} {verdict.fix}"] if verdict.fix else lines
    )


def excerpt_of(lines: Sequence[str], most: int) -> list[str]:
    """Return the `most` lines that say most of a traceback or of a rank's last output."""
    lines = [line for line in lines if not MARKS.fullmatch(line)]
    if len(lines) <= most:
        return list(lines)
    frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
    # In a fatal error's dump the innermost frame comes first.
    if lines[0].startswith("Fatal Python error"):
        return [*lines[: most - 1], left_out(len(lines) - most + 1)]
    if not frames:
        return [left_out(len(lines) - most + 1), *lines[-(most - 1) :]]
    last = range(frames[-1] + 1, len(lines))
    end = next((number for number in last if lines[number][:1].strip()), len(lines))
    above, message = lines[:end], lines[end:]
    if len(message) > MESSAGE_LINES:
        message = [*message[: MESSAGE_LINES - 1], left_out(len(message) - MESSAGE_LINES + 1)]
    room = max(1, most - len(message) - 2)
    if len(above) > room + 2:
        above = [above[0], left_out(len(above) - room - 1), *above[-room:]]
    return [*above, *message]


def left_out(count: int) -> str:
    return f"... ({plural(count, 'line')} left out)"


def in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join([*map(str, ranks[:8]), *["..."] * (len(ranks) > 8)])
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
