"""Hands a job over to a warm process of this node, if one fits: else its start is cold."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.job.ranks.agent_start import limits
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.supervisor import agent_environment
from orchestrator.node.warm import frames, pairs, setting
from orchestrator.node.warm.pairs import Pair
from orchestrator.protocol.spec import Spec

IMPORT_SECONDS = 12.0


class WarmSupervisor(NamedTuple):
    """A supervisor that was warm: it says on `stdout` how its start went, as a cold one does."""

    process: Process
    stdout: IO[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        processes.send(self.process, signal.SIGKILL)


class Attempt(NamedTuple):
    """The warm supervisor, or why the start has to be cold; neither where nobody asked."""

    supervisor: WarmSupervisor | None = None
    why: str = ""


def hand_over(
    run: RunDir, spec: Spec, environ: Mapping[str, str], umask: int, files: Sequence[int]
) -> Attempt:
    """Let a warm process be the supervisor of this job, if there is one that fits."""
    reason = setting.unsuitable(spec, environ)
    if reason:
        return Attempt(why=f"cold start: {reason}")
    wanted = setting.setting_of(spec, environ, pairs.library(), umask)
    key = setting.key_of(wanted)
    waited = os.path.isdir(os.path.join(pairs.root(), key))
    own = wanted.get(setting.JOB)
    there = [pair for pair in pairs.all_pairs() if pair.setting.get(setting.JOB) == own]
    for pair in there:
        if pair.key == key:
            return take(pair, run, spec, environ, files)
    reason = pairs.why_unfit(key) or pairs.why_left(key)
    if not reason and waited:
        reason = "the process that waited was killed"
    elif not reason and there:
        reason = setting.in_words(setting.differences(there[-1].setting, wanted))
    if spec.warm:
        for pair in there:
            pairs.end(pair)
    return Attempt(why=f"cold start: {reason or 'nothing waited there'}")


def take(
    pair: Pair,
    run: RunDir,
    spec: Spec,
    environ: Mapping[str, str],
    files: Sequence[int],
) -> Attempt:
    """Ask a pair for its supervisor; one that does not answer is ended before the cold start."""
    process = processes.find(pair.pid)
    order = {
        "do": "take",
        "job": spec.job,
        "node": spec.node,
        "environ": dict(environ),
        "environment": agent_environment(spec, run.path, environ),
        "limits": limits(),
        "library": pairs.library(),
        "directory": os.getcwd(),
    }
    reading, writing = os.pipe()
    reason = "the warm process did not answer"
    lives = bool(pairs.ask(pair))  # whatever it still imports, a cold start would, too
    try:
        with pairs.connect(pair) as client:
            if processes.peer(client).uid != os.getuid() or process is None:
                raise PermissionError
            if lives:
                client.settimeout(IMPORT_SECONDS)
                reason = f"what waits still imports, after {IMPORT_SECONDS:g} s more"
            frames.send(client, order, [writing, *files])
            answer = frames.receive(client)[0]
            reason = str(answer.get("no", reason))
            if answer.get("yes") == pair.pid:
                frames.send(client, {"go": True})
                return Attempt(WarmSupervisor(process, os.fdopen(reading, "rb", buffering=0)))
    except (OSError, EOFError, ValueError):
        pass
    finally:
        os.close(writing)
    with contextlib.suppress(OSError):
        os.close(reading)
    pairs.end(pair)
    return Attempt(why=f"cold start: {reason}")
