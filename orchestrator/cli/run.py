"""Run a command; every error becomes a sentence and an exit code here."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from orchestrator.common import files, interrupt
from orchestrator.common.errors import EXIT_USAGE, OrchestratorError

# A full or read-only disk is never a defect of this program.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# What the user's files are like: said where it is known, and here wherever else it is met.
CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
# The output's reader has gone, as in head/screen/output.py.
GONE = (errno.EPIPE, errno.EIO)


def complain(text: str) -> None:
    from orchestrator.head.screen import output

    output.complain(text)


def say_if_untested() -> None:
    if sys.platform != "linux":
        complain(f"orchestrator: as a head, {sys.platform} is untested here")


def output_is_whole() -> bool:
    """Return True if all output was written; a full disk may have refused some of it."""
    output = sys.modules.get("orchestrator.head.screen.output")
    return output is None or not output.complain_once.cache_info().currsize


def here_exists() -> bool:
    try:
        return bool(Path.cwd())
    except FileNotFoundError:
        return False


# Options of the version before, and what is typed in their place.
GONE_OPTIONS = {
    "--job": "leave it out: a shell has no job's variables",
    "--no-job": "leave it out: a shell has no job's variables",
    "--pin": "touch experiments/NAME/.pin",
    "--unpin": "rm experiments/NAME/.pin",
    "--list": "--dry-run shows what goes, --json all of them",
    "--verbose": "--json",
    "--env-file": "--env NAME=VALUE, once for each",
    "--trust-record": "leave it out: no record of an experiment is read",
    "--prolog": "--hook FILE runs on each node before its ranks",
    "--epilog": "run it after master_launch: orchestrator exec COMMAND",
    "--prolog-timeout": "--hook FILE runs on each node before its ranks",
    "--cordon": "# before its line in the node list keeps jobs off a machine",
    "--reason": "write it behind the # in the node list",
    "--uncordon": "remove the # before its line in the node list",
    "--history": "orchestrator ls shows how jobs ended",
    "--nightly": "run `orchestrator doctor --json` from cron",
    "--resume": "begin a new sweep with the values that are left",
    "--priority": "a queue is first come, first served",
    "--preempt": "a queue is first come, first served",
    "--at": "run it from at(1) or cron",
    "--after-any": "--after EXP waits for a job that ended well",
    "--for": "leave it out: a queue is first come, first served",
    "--grow-every": "a job takes back its nodes at its next attempt (--max-restarts)",
    "--sdc": "leave it out: NVIDIA's dcgmi diag, or AMD's rvs, tests devices",
    "--from-index": "leave it out: the wheels are downloaded once, here",
    "--fresh": "end what waits first: orchestrator nodes --warm off",
    "--launcher": "--nodes-from slurm, or --start-with accelerate",
    "--no-activate": "--activate none",
    "--no-check": "--check none",
    "--note": "--set launch.note=TEXT",
    "--numa-binding": "bind in the program, or --wrap numactl on the node",
    "--env-pass": "--env NAME passes a variable on as it is set here",
    "--on-hang": "--hang-timeout 0 leaves a job that hangs alone",
    "--on-head-loss": "a job continues without its head; orchestrator stop ends it",
    "--on-node-loss": "--node-loss-timeout SECONDS waits for longer",
    "--rank-env": "--set launch.rank_env=slurm",
    "--start": "--set launch.start=plain",
    "--array": "--as env --grid ORCHESTRATOR_ARRAY_INDEX=0..9",
    "--random": "--optuna N draws from ranges",
    "--scaling": "a report of several runs has what each rank contributes in its table",
    "--into": "set ORCHESTRATOR_HOME in the nodes' environment",
    "--prune": "orchestrator exec rm -rf '~/.orchestrator/environments', then bootstrap",
    "--relays": "leave it out: the head connects to every node",
}


def usage_words(error: click.ClickException) -> str:
    """Return the text for a usage error: the mistake, the usage line, and where to read more."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    what = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        what = f"no such option {error.option_name}"
        if instead := GONE_OPTIONS.get(error.option_name):
            what = f"{error.option_name} was removed: {instead}"
        elif error.possibilities:
            what += f"; did you mean {error.possibilities[0]}?"
    elif type(error) is click.BadParameter and error.param is not None:
        name = error.param.opts[0]
        what = f"{name}: {error.message.rstrip('.').removeprefix(f'{name} ')}"
    elif isinstance(error, click.BadOptionUsage) and what.endswith("requires an argument"):
        what = f"{error.option_name} needs a value"
    context = getattr(error, "ctx", None)
    lines = [f"error: {what[:1].lower()}{what[1:]}"]
    if context is not None:
        pieces = context.command.collect_usage_pieces(context)
        lines.append(f"  {' '.join([context.command_path, *pieces])}")
        lines.append(f"  more: {context.command_path} --help")
    return "\n".join(lines)


def run_command(command: click.Command, name: str) -> NoReturn:
    """Run a command; print every error as a sentence and exit with its code."""
    say_if_untested()
    interrupt.call_before_exit(files.remove_unfinished)
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except OrchestratorError as error:
        from orchestrator.cli.help import topic_of

        topic = topic_of(error.about or str(error))
        complain(f"error: {error}" + (f"\n  more: orchestrator help {topic}" if topic else ""))
        code = error.exit_code
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as error:
        complain(usage_words(error))
        code = error.exit_code
    except OSError as error:
        if error.errno == errno.ENOENT and not here_exists():
            error = OSError(errno.ENOENT, "this directory was removed: go to another")
        elif error.errno not in FULL and not (error.errno in CLOSED and error.filename):
            raise
        where = f"{error.filename}: " if error.filename else ""
        complain(f"error: {where}{error.strerror}")
        code = EXIT_USAGE
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (*GONE, *FULL):
            raise
        if error.errno in FULL:
            code = code or EXIT_USAGE
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not output_is_whole():
        code = code or EXIT_USAGE
    interrupt.exit_at_once(code if isinstance(code, int) else 0)
