"""Finds the one cause in many nodes' endings: which node, which rank, which line. Pure."""

from __future__ import annotations

import re
import signal
import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.head.follow import failure_kinds
from orchestrator.protocol.events import Ended, RankEnded, RankError

FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:,? in (\S+))?', re.MULTILINE)
PACKAGES = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.]\d+/|^<|/orchestrator/node/job/(rank|fast_torchrun|run_function)[.]py$"
)
IN_A_WORKER = re.compile(r"^Caught \w+ (in DataLoader worker process \d+)")
WHAT = re.compile(r"^\s*what\(\):\s+(.+)$", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):"
OWN, NODE, EARLY, APART, LEFT = range(5)  # the nearer to the cause, the smaller


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong on one node, at a time of the head's clock."""

    node: int
    node_name: str
    rank: int | None
    time: float
    kind: str  # one of kinds.KINDS
    message: str
    traceback: str = ""
    where: str = ""  # the user's own line: file:line in function
    fix: str = ""  # where its own words say what to do
    words: str = ""  # more that it said, to know it by

    @property
    def distance(self) -> int:
        """Say how far it is from the cause: what only says that another one is gone is far."""
        said = f"{self.message}\n{self.words}"
        if self.kind == "ended_early":
            return EARLY
        may_echo = self.kind in ("exception", "communication", "exit", "signal", "torchrun")
        if (
            may_echo
            and failure_kinds.ECHO.search(said)
            and not failure_kinds.OWN_NETWORK.search(said)
        ):
            return APART if failure_kinds.NEVER_MET.search(said) else LEFT
        return NODE if self.kind in ("torchrun", "supervisor") else OWN

    @property
    def echo(self) -> bool:
        return self.distance in (APART, LEFT)

    @property
    def who(self) -> str:
        place = f"node {self.node} ({self.node_name})"
        return place if self.rank is None else f"rank {self.rank} on {place}"


# -- one failure ------------------------------------------------------------------------------


def of_rank(node: int, name: str, event: RankEnded, time: float, exit_words: str = "") -> Failure:
    """Say how a rank failed. `exit_words`: what it gave to sys.exit."""
    code, error = event.code, event.error
    begun = Failure(node, name, event.rank, time, "exit", "")
    # A child that the rank forked may have left an exception too: no cause of a signal.
    if error and (code >= 0 or error.pid == event.pid):
        return _of_exception(begun, event, error)
    return _of_signal(begun, event, -code) if code < 0 else _of_exit(begun, event, exit_words)


def _of_exception(begun: Failure, event: RankEnded, error: RankError) -> Failure:
    kind, text, trace = error.type, error.message, error.traceback
    message = f"{kind}: {text}" if text else kind
    where = f"{error.file}:{error.line} in {error.function}" if error.file else ""
    words = "\n".join([message, *last_lines(trace)])
    if kind in ("SyntaxError", "IndentationError", "TabError"):
        where = users_line(trace) or where
    worker = IN_A_WORKER.match(text)
    if worker:  # the line that failed is in what it tells, not where the rank waited for it
        where = users_line(text) or where
        message = f"{(last_lines(text) or [message])[-1]} ({worker[1]})"
        words = "\n".join([message, *last_lines(text)])
    found = failure_kinds.of_words(words) or "exception"
    if event.oom_kills and failure_kinds.HELPER_DIED.search(words):
        found = "out_of_memory"
        message += "; the kernel's out-of-memory killer was at work on this node"
    when = begun.time - event.time + error.time
    told = replace(begun, time=when, kind=found, message=message, words=words)
    return replace(told, traceback=trace, where=where)


def _of_signal(begun: Failure, event: RankEnded, number: int) -> Failure:
    name, said = signal_name(number), event.said
    message, kind, words = f"killed by signal {number} ({name})", "signal", ""
    if name == "SIGKILL" and event.oom_kills:
        kind = "out_of_memory"
        peak = f" (its peak was {event.peak_kb / 2**20:.1f} GiB)" if event.peak_kb else ""
        message += f": the kernel's out-of-memory killer was at work on this node{peak}"
    elif name == "SIGBUS" and event.shm_full:
        kind = "shared_memory"
        message += ": /dev/shm is full on this node"
    elif name == "SIGABRT":
        what = WHAT.findall(said)
        message += f": {what[-1]}" if what else ""
        words = before_dump(said)
        kind = failure_kinds.of_words("\n".join(what)) or kind
    where = users_line(said.rpartition("(most recent call first)")[2], innermost_first=True)
    return replace(begun, kind=kind, message=message, words=words, where=where)


def _of_exit(begun: Failure, event: RankEnded, words: str) -> Failure:
    code, said = event.code, event.said
    if words and not words.lstrip("-").isdigit():
        first, _, rest = words.partition("\n")
        fix = rest.strip() if rest.startswith("  ") else ""  # as our own errors have it
        kind = failure_kinds.of_words(words) or "exit"
        return replace(begun, kind=kind, message=first, words=words, fix=fix)
    message = f"ended with exit code {code}"
    if code > 128 and signal_name(code - 128) != "unknown":
        message += f", as after {signal_name(code - 128)}"
    trace = TRACEBACK + said.rpartition(TRACEBACK)[2] if TRACEBACK in said else ""
    last = last_lines(trace)
    if not last:
        return replace(begun, message=message)
    message += f", after {last[0]}"
    told = replace(
        begun, kind=failure_kinds.of_words(last[0]) or "exit", message=message, words=last[0]
    )
    return replace(told, traceback=trace, where=users_line(trace))


def of_torchrun(node: int, name: str, event: Ended, time: float) -> Failure:
    """Say how torchrun failed, on a node where no rank had."""
    said, code = event.said, event.agent
    trace = TRACEBACK + said.rpartition(TRACEBACK)[2] if TRACEBACK in said else said
    last = last_lines(trace)
    begun = Failure(node, name, None, time, "torchrun", f"torchrun ended with exit code {code}")
    if code == -signal.SIGKILL and event.oom_kills:
        words = ": the kernel's out-of-memory killer was at work on this node"
        return replace(begun, kind="out_of_memory", message=begun.message + words)
    if not last:
        return begun
    message = f"{begun.message}: {last[-1]}"
    return replace(
        begun, kind=failure_kinds.of_words(last[-1]) or "torchrun", message=message, words=last[-1]
    )


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
    """Return `file:line in function` of the innermost frame that is no package's."""
    frames = [match for match in FRAME.finditer(trace) if not PACKAGES.search(match[1])]
    if not frames:
        return ""
    file, line, function = frames[0 if innermost_first else -1].groups()
    return f"{file}:{line}" + (f" in {function}" if function else "")


def before_dump(said: str) -> str:
    return said.partition("Fatal Python error")[0]


# -- of all failures --------------------------------------------------------------------------


def cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the earliest of those nearest to the cause, in whatever order they were heard of."""
    early = [f.time for f in failures if f.distance > EARLY]
    # That a rank ended well explains only those who missed it afterwards.
    known = [f for f in failures if f.distance != EARLY or (early and f.time < min(early))]
    return min(known, key=lambda failure: (failure.distance, failure.time), default=None)


def conclude(failures: Sequence[Failure], ended_badly: int) -> dict[str, Any] | None:
    """Return what job.json says: the cause, and how many ranks ended likewise or because of it."""
    found = cause(failures)
    if found is None:
        return None
    if found.distance == LEFT and failure_kinds.BROKEN.search(found.message.lower()):
        found = replace(found, kind="link")
    own = {f.rank: f for f in failures if f.distance == OWN and f.rank not in (None, found.rank)}
    same = [f for f in own.values() if f.message == found.message and found.distance == OWN]
    also = [f for f in own.values() if f not in same]
    known = len(own) + (found.rank is not None and found.kind != "ended_early")
    told = {name: value for name, value in vars(found).items() if name != "words"}
    return {
        **told,
        "title": failure_kinds.title(found.kind),
        "fix": found.fix or failure_kinds.fix_of(found.kind, found.message),
        "same": sorted(f.rank for f in same if f.rank is not None),
        "also": [{"rank": f.rank, "node": f.node, "message": first_line(f.message)} for f in also],
        "others": max(0, ended_badly - known),
    }


def stopped(why: str, time: float) -> dict[str, Any]:
    return _without_a_node("stopped", why, time)


def not_started(why: str, time: float) -> dict[str, Any]:
    return _without_a_node(failure_kinds.of_words(why) or "start", why, time)


def _without_a_node(kind: str, message: str, time: float) -> dict[str, Any]:
    told = {"node": None, "node_name": "", "rank": None, "time": time, "kind": kind}
    text = {"message": message, "traceback": "", "where": "", "title": failure_kinds.title(kind)}
    return {**told, **text, "fix": failure_kinds.fix_of(kind), "same": [], "also": [], "others": 0}


def to_lines(told: dict[str, Any]) -> list[str]:
    """Return the last lines on the screen."""
    who = f"node {told['node']} ({told['node_name']})" if told["node"] is not None else "the head"
    who = who if told["rank"] is None else f"rank {told['rank']} on {who}"
    at = clock.strftime("%H:%M:%S", clock.localtime(told["time"]))
    lines = [f"the cause: {who}, {at}: {told['title']}: {first_line(told['message'])}"]
    if told["where"]:
        lines.append(f"  at {told['where']}")
    if told["same"]:
        lines.append(f"  the same on {plural(told['same'])}")
    for other in told["also"][:3]:
        place = f"rank {other['rank']} on node {other['node']}"
        lines.append(f"  {place} failed by itself too: {other['message']}")
    if told["others"]:
        more = "1 more rank" if told["others"] == 1 else f"{told['others']} more ranks"
        lines.append(f"  {more} ended because of it")
    return [*lines, f"what to do: {told['fix']}"] if told["fix"] else lines


def plural(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
