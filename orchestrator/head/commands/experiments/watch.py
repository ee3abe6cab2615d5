"""`orchestrator watch`: keep a job going without a terminal, from cron or as a systemd user unit.

It waits while another head follows the job, and takes its place when that is lost.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from orchestrator.common.errors import EXIT_DONE, EXIT_STOPPED, UsageError
from orchestrator.config.launch import View, Where
from orchestrator.head.commands.follow import follow_again
from orchestrator.head.screen.output import say, tell
from orchestrator.head.status.find_job import FoundJob, adopt_job
from orchestrator.records import experiments
from orchestrator.records.experiment import this_head

LOOK_SECONDS = 2.0  # between two looks whether another head is still there
WATCH = ".watch"  # in the experiment: held by the one that watches

UNIT = """\
# systemctl --user enable --now FILE; `loginctl enable-linger` lets it run without a login
[Unit]
Description=orchestrator keeps {name} going
After=network-online.target

[Service]
WorkingDirectory={directory}
ExecStart={command}
Restart=on-failure
RestartSec=10

[Install]
WantedBy=default.target
"""


def watch(where: Where, wanted: str | None) -> int:
    """Follow a job until it is over, whenever nobody else does; a second watcher leaves at once."""
    job = adopt_job(where, wanted)
    if job.record.head_elsewhere:
        raise UsageError(f"the head of {job.experiment.name} can run only where the job is")
    if not job.record.over and not job.experiment.hold(WATCH):
        say(f"{job.experiment.name} is watched already")
        return EXIT_DONE
    while True:
        record = job.experiment.read_record()
        if record.over:
            say(f"{job.experiment.name}: {record.state}")
            return EXIT_DONE
        if job.experiment.lock(background=True) is not None:
            time.sleep(LOOK_SECONDS)
        elif not take_up(job):
            return EXIT_STOPPED  # somebody has ended this process, and the job goes on


def take_up(job: FoundJob) -> bool:
    """Be the head of a job until it is over or another one takes its place; False: left alone."""
    record = job.experiment.read_record()  # the head that left may have seen its end
    if record.over:
        job.experiment.unlock()
        return True
    record = replace(record, head=this_head())
    view = View(quiet=True, color=False)
    code = follow_again(job.experiment, record, job.transport, view, left_behind=True)
    return code == EXIT_STOPPED or job.experiment.read_record().over


def print_unit(where: Where, wanted: str | None) -> int:
    """Print a systemd user unit that watches the job."""
    root = where.experiments.absolute()
    experiment = experiments.known(root, wanted, trusted=where.trust_record)
    words = [sys.executable, "-m", "orchestrator", "watch", str(experiment.path)]
    if where.ssh_config is not None:
        words += ["--ssh-config", str(where.ssh_config.absolute())]
    name, directory = (text.replace("%", "%%") for text in (experiment.name, str(root.parent)))
    command = " ".join(map(quoted, words))
    tell(UNIT.format(name=name, directory=directory, command=command))
    return EXIT_DONE


def quoted(word: str) -> str:
    """Quote a word for systemd: it replaces % and $ within quotes, too."""
    for character, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(character, written)
    return f'"{word}"'
