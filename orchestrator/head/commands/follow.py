"""Stay with a running job until it is over: its log lines, its end, its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.common import files, logs
from orchestrator.common.errors import EXIT_DONE, EXIT_STOPPED, OrchestratorError, UsageError
from orchestrator.common.text import format_duration, plural
from orchestrator.config.launch import View, Where
from orchestrator.head.background.process import Background, Hears, Pipe
from orchestrator.head.events.notify import job_notifier
from orchestrator.head.follow import verdict
from orchestrator.head.follow.conclusion import end_of_attempt
from orchestrator.head.follow.run import Run
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.schedulers.backend import backend_of
from orchestrator.head.screen import output, progress, styles
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.events import say, tell
from orchestrator.head.screen.keyboard import Keyboard
from orchestrator.head.screen.lines import fit_columns
from orchestrator.head.screen.log_reader import last_words
from orchestrator.head.screen.screen import Screen
from orchestrator.head.start.job import FollowSession, JobEnding, make_screen
from orchestrator.head.status import status
from orchestrator.head.status.status import FoundJob, find_job
from orchestrator.protocol.timing import HEAD_LEAVES_SECONDS
from orchestrator.records import goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord, this_head
from orchestrator.records.metrics import progress as job_progress
from orchestrator.records.outcome import Cause, Head

if TYPE_CHECKING:
    from orchestrator.head.start.record import Running

log = logging.getLogger(__name__)

# The report fits on the smallest usual terminal, 80 x 24, with its prompt.
PAGE_ROWS, PAGE_COLUMNS = 22, 80
# The traceback keeps at least this many lines, however long the report is.
FEWEST_LINES = 5
# The report describes only the last attempts; job.json has all of them.
MOST_ATTEMPTS = 3


def follow_launched(
    running: Running, view: View, keys: Keyboard | None = None, where: Where | None = None
) -> int:
    """Follow a job from its start, over the channels that started it.

    With `where`, a head that leaves the job running leaves another one behind in the background.
    """
    log.info("process %d follows job %s", os.getpid(), running.record.job)
    session = FollowSession(
        running.experiment,
        running.transport,
        backend_of,
        view,
        keys=keys,
    )
    screen = make_screen(running.experiment, running.record, view, folds=True)
    with job_notifier(running.experiment, running.record):
        return report(session, session.follow(running, screen), where)


def follow_again(
    job: FoundJob,
    record: JobRecord,
    view: View,
    keys: Keyboard | None = None,
    where: Where | None = None,
    *,
    left_behind: bool = False,
    looks_on: bool = False,
) -> int:
    """Follow a running job as its new head, from its recorded state."""
    logs.write_log_to(job.experiment.head_log)
    log.info("process %d follows job %s, which runs already", os.getpid(), record.job)
    record = replace(record, head=this_head())
    session = FollowSession(
        job.experiment,
        job.transport,
        backend_of,
        view,
        keys=keys,
        left_behind=left_behind,
        looks_on=looks_on,
    )
    with job_notifier(job.experiment, record):
        return report(session, session.join(record), where)


def report(session: FollowSession, ending: JobEnding, where: Where | None) -> int:
    """Report the end of a head's session on the terminal and by notifications.

    Return the exit code of the command. The job may have ended, or may go on under another head.
    """
    experiment, record, run = session.experiment, ending.record, ending.run
    if run is not None and run.successor is not None:
        say(f"{run.successor} has taken over; this head ends, the job continues")
        # Not 0: a script that waits for this command must not assume that the job is done.
        return EXIT_STOPPED
    if run is not None and run.end.left:
        leave(run, ending.screen, where)
        return EXIT_STOPPED if run.interrupts else EXIT_DONE
    again = run is not None and run.stopped_in_time
    if again and backend_of(record).start_again(experiment, record):
        return EXIT_STOPPED
    tell(end_of_attempt(experiment, record))
    return report_end(experiment, record, ending.screen)


def leave(running: Run, screen: Screen | None, where: Where | None) -> None:
    """Leave a job running; with `where`, a background head goes on recording its logs."""
    log.info("this head leaves; the job runs on")
    experiment, words = running.experiment, ""
    if where is not None and not running.record.head_elsewhere:
        if screen is not None and not screen.quiet:
            experiment.keep_shown(screen.positions)
        on_purpose = running.left_on_purpose
        words = f"; {leave_to_background(experiment, where, on_purpose=on_purpose)}"
    say(f"left running{words}; follow it again: orchestrator attach {experiment.name}")


def show_unseen(experiment: Experiment, record: JobRecord, view: View) -> None:
    """Show the log lines that were fetched after the user had detached."""
    shown = None if view.quiet else experiment.take_shown()
    if shown is not None:
        screen = make_screen(experiment, record, view)
        screen.skip_to(shown)
        while screen.pump():
            pass
        screen.close()


def report_end(experiment: Experiment, record: JobRecord, screen: Screen | None = None) -> int:
    """Print how the job ended, and if it failed, the one traceback that matters, and the verdict.

    All of it fits on a small terminal, however many ranks have failed.
    """
    assert record.ended is not None and record.exit_code is not None
    log.info("the job has ended: %s, exit code %d", record.state, record.exit_code)
    cause = record.verdict
    lines = [f"{state_of(record)} after {format_duration(record.ended - record.started)}"]
    if words := goodput.shares_in_words({} if screen is None else record.goodput):
        lines[0] += f" ({words})"
    if cause is None or record.state == "stopped":
        reason = cause.message if cause else ""
        if reason and reason not in (verdict.STOPPED_BY_USER, verdict.KILLED_BY_USER):
            # Another process ended the job, so the user may not know the reason.
            lines[0] += f" ({reason})"
        lines[0] = progress.SEPARATOR.join([lines[0], *how_far(experiment, record)])
        lines += [*report_attempts(record), *closing(experiment, record)]
    else:
        lines[0] += f"; all logs are in {output.short_path(experiment.logs)}"
        lines += report_attempts(record)
    for line in lines:
        (output.print_own_line if line.startswith("  ") else say)(line)
    if cause is None or record.state == "stopped":
        return record.exit_code
    tree = manifest.working_tree(experiment)
    known = cause.node is not None and cause.node < len(record.nodes)
    rank = "" if cause.rank is None else f" --rank {cause.rank}"
    logs = f"orchestrator logs {shlex.quote(experiment.name)}{rank}" if known else ""
    told = verdict.verdict_to_lines(
        crash_dump.own_paths_in_verdict(cause, tree), logs, styles.style_text
    )
    if known:
        show_words(experiment, record, cause, rows_of([*lines, *told]))
    for line in told:
        (output.print_own_line if line.startswith("  ") else say)(line)
    return record.exit_code


def how_far(experiment: Experiment, record: JobRecord) -> list[str]:
    """Return the job's progress as phrases (step, loss), without rate and time left."""
    known, _ = job_progress.read_progress(experiment.path, record)
    return job_progress.progress_texts(replace(known, rate=None, left=None))


def closing(experiment: Experiment, record: JobRecord) -> list[str]:
    """Return two lines: the experiment's directory, and the command that usually follows."""
    word = "rerun" if record.state == "stopped" else "report"
    name = shlex.quote(experiment.name)
    return [
        f"  where: {output.short_path(experiment.path)}",
        f"  next:  orchestrator {word} {name}",
    ]


def state_of(record: JobRecord) -> str:
    return styles.style_text(record.state, styles.STATES.get(record.state, ""))


def rows_of(lines: Sequence[str]) -> int:
    """Count the rows of a terminal that these lines take."""
    width = output.terminal_of().width or PAGE_COLUMNS
    return sum(
        -(-(len(output.OURS) + 1 + len(output.printable_text(line))) // width) for line in lines
    )


def show_words(experiment: Experiment, record: JobRecord, cause: Cause, taken: int) -> None:
    """Print the traceback of the failed rank, or else its last log lines."""
    assert cause.node is not None
    node, rank = record.node(cause.node), cause.rank
    tree = manifest.working_tree(experiment)
    prefix = f"node{node.index} | " if rank is None else f"node{node.index} rank{rank} | "
    (log,) = log_files(experiment, [node])
    lines = cause.traceback.splitlines() or last_words(log, rank) or ["(nothing was printed)"]
    width = output.terminal_of().width
    most = (width - len(prefix)) if width else verdict.LONGEST_LINE
    for line in verdict.excerpt_of(lines, max(FEWEST_LINES, PAGE_ROWS - taken)):
        text = crash_dump.own_paths_in_text(output.printable_text(line), tree)
        output.print_own_line(styles.style_text(prefix, styles.DIM) + fit_columns(text, most))


def report_attempts(record: JobRecord) -> list[str]:
    """Return a line for each of the last attempts of a restarted job: when and why it ended."""
    lines, earlier = [], record.attempts[:-1]
    if len(earlier) > MOST_ATTEMPTS:
        lines.append(f"{plural(len(earlier) - MOST_ATTEMPTS, 'attempt')} before these: job.json")
    for one in earlier[-MOST_ATTEMPTS:]:
        at = "" if one.step is None else f" at step {one.step}"
        why = f"attempt {one.number} ended after {one.ended - one.started:.1f} s{at}: {one.why}"
        lines.append(styles.style_text(why, styles.WARNING))
    if record.attempts and record.state in ("failed", "lost"):
        last = record.attempts[-1]
        lines.append(f"attempt {last.number} was the last: {last.why}")
    return lines


# -- in the background ------------------------------------------------------------------------


SILENT = View(quiet=True)


def leave_to_background(experiment: Experiment, where: Where, *, on_purpose: bool) -> str:
    """Start a background head for a job; return a phrase that says if its logs are recorded."""
    which: dict[str, Any] = {"experiment": str(experiment.path), "where": where}
    try:
        head = Background(
            follow_in_background, **which, left_behind=True, on_purpose=on_purpose
        ).answer()
    except (OrchestratorError, OSError) as error:
        return f"its logs stay on the nodes, for no head can go on in the background: {error}"
    return f"background process {head['pid']} keeps recording its logs and its result"


def follow_in_background(
    answers: Hears,
    where: Where,
    experiment: str | None,
    left_behind: bool = False,
    on_purpose: bool = False,
) -> None:
    """Follow a job without a head from a background process, and report its log sizes.

    An `attach` takes the job over from this head. With `on_purpose`, the previous head left the
    job running deliberately, and the job does not depend on this head.
    """
    logs.hold_lines()
    keys = Pipe()
    job = find_job(where, experiment)
    place = {"place": str(job.experiment.path), "pid": os.getpid()}
    elsewhere = job.record.over or job.record.head_elsewhere
    if elsewhere or job.experiment.lock(background=True) is not None:
        answers.send(**place, logs={})
        return
    record = job.experiment.read_record()
    states = [] if record.over or left_behind else status.ask_nodes(job.transport, record)
    sizes = {
        node.index: state.log_bytes or 0 for node, state in zip(record.nodes, states, strict=False)
    }
    redirect_output(job.experiment)
    answers.send(**place, logs=sizes)
    if not record.over:
        follow_again(
            job,
            record,
            SILENT,
            keys,
            where=None if left_behind else where,
            left_behind=left_behind,
            looks_on=on_purpose,
        )


def redirect_output(experiment: Experiment) -> None:
    """Redirect stdout and stderr to head.txt, as a background head has no terminal."""
    styles.choose_colors(color=False)
    # A full disk loses only what this head prints.
    with contextlib.suppress(OSError):
        fd = files.open_to_append(experiment.path / "head.txt")
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(fd, f"orchestrator: {at}: process {os.getpid()} follows this job\n".encode())
        os.close(fd)


# `orchestrator attach`: follow a running job again.


def attach_to_job(where: Where, wanted: str | None, view: View, *, steal: bool) -> int:
    logs.hold_lines()
    job = find_job(where, wanted)
    experiment = job.experiment
    if job.record.over:
        show_unseen(experiment, job.record, view)
        return report_end(experiment, job.record)
    code = job.backend.watch(experiment, job.record, report_end)
    if code is not None:
        return code
    holder = experiment.steal(HEAD_LEAVES_SECONDS) if steal else experiment.lock()
    if holder is not None and holder.background:
        holder, steal = experiment.steal(HEAD_LEAVES_SECONDS), True
    if holder is not None:
        raise followed(experiment, holder, stolen=steal)
    # The previous head may have written a newer record before it released the lock.
    record = experiment.read_record()
    if record.over:
        experiment.unlock()
        show_unseen(experiment, record, view)
        return report_end(experiment, record)
    count = plural(len(record.nodes), "node")
    say(f"{experiment.name}: {count}; d leaves it running, Ctrl-C stops it")
    return follow_again(job, record, view, where=where)


def followed(experiment: Experiment, holder: Head, *, stolen: bool) -> UsageError:
    """Return the error for a job whose lock another head holds and does not release."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    still = f" and did not leave within {HEAD_LEAVES_SECONDS:.0f} s" if stolen else ""
    return UsageError(
        f"{experiment.name} is followed by {holder}, since {since}{still}",
        f"end that process (kill -9 {holder.pid} there); the job continues"
        if stolen
        else f"take it over: orchestrator attach --steal {experiment.name}; "
        f"just watch: orchestrator logs -f {experiment.name}",
    )
