"""A process of our own for Python programs: it does what a command does, and outlives who asked.

job.py and cluster.py ask; both ends of the pipe are here. One line of JSON is the request, lines of
JSON are the answers. A head then stays as long as its job; what comes down the pipe are keys, as
on a command's terminal; what it says goes to head.txt of the experiment. So the asking program,
which may be a notebook, opens no connection, has no thread and no signal handler of ours, and no
child either: what ends a notebook's children does not end its jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator import errors
from orchestrator.errors import OrchestratorError, UsageError

if TYPE_CHECKING:
    from orchestrator.records.experiment import Experiment

# Isolated, and then on the asking program's own path: no module of its directory gets in first.
START = "import json,sys;r=json.loads(sys.stdin.buffer.readline());sys.path[:]=r.pop('path');"
START += "from orchestrator.api.head_process import main;main(r)"
INTERRUPT = b"\x03"
LEAVE = b"d"

log = logging.getLogger("orchestrator")


class Background:
    """The asking end."""

    def __init__(self, do: str, **request: Any) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as we
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, "orchestrator", do],  # for who reads ps
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C in our terminal is ours alone
        )
        assert process.stdin is not None and process.stdout is not None
        self.keys, self.answers = process.stdin, process.stdout
        self.process = process
        self.press(json.dumps({"path": sys.path, "do": do, **request}).encode() + b"\n")

    def press(self, key: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and what was asked with it
            self.keys.write(key)
            self.keys.flush()

    def gone(self, seconds: float = 0.0) -> bool:
        """Has it ended? Waits for that so long. Nobody reads what it may yet say."""
        poll = select.poll()
        poll.register(self.answers, 0)
        return bool(poll.poll(seconds * 1000))

    def answer(self) -> dict[str, Any]:
        """Its next answer; an error is raised here as it was there."""
        while True:
            line = self.answers.readline()
            self.process.wait()  # it has left its child behind, and is no child of ours
            if not line:
                raise OrchestratorError(self.last_words())
            told: dict[str, Any] = json.loads(line)
            if "say" in told:
                log.info("%s", told["say"])
            elif "error" in told:
                raise getattr(errors, told["error"])(told["what"], told["fix"])
            else:
                return told

    def last_words(self) -> str:
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip()[-2000:]
        return f"our background process ended without an answer{': ' + said if said else ''}"


# -- the other end --------------------------------------------------------------------------------


class Pipe:
    """Keys that come down the pipe: Ctrl-C is the signal that it is on a terminal."""

    def __init__(self) -> None:
        self.typed: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while key := sys.stdin.buffer.read(1):
            if key == INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                self.typed.put(key.decode("ascii", "replace"))

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def pressed(self) -> str:
        return "" if self.typed.empty() else self.typed.get()


class Answers:
    """To whoever asked, for as long as that one is there."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="ascii")
        os.dup2(2, 1)  # what anybody prints is no answer

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()


def main(request: dict[str, Any]) -> NoReturn:
    if os.fork():
        os._exit(0)
    from orchestrator import interrupt

    interrupt.answer_at_once()
    answers = Answers()
    request["options"]["keys"] = Pipe()
    try:
        {"launch": launch, "take_up": take_up, "stop": stop}[request["do"]](answers, request)
    except OrchestratorError as error:
        kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
        answers.tell(error=kind.__name__, what=error.what, fix=error.fix)
    except OSError as error:  # a full disk, most of all
        where = f"{error.filename}: " if error.filename else ""
        answers.tell(error="OrchestratorError", what=f"{where}{error.strerror}", fix="")
    except BaseException:  # noqa: BLE001  a defect of ours: Background.last_words shows it
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(0)  # threads that still wait for a dead node must not hold the exit


def launch(answers: Answers, request: dict[str, Any]) -> None:
    import click

    from orchestrator.cli.launch import launch_command
    from orchestrator.cli.options import DEFAULT_CONFIG, DEFAULT_HOOK
    from orchestrator.head.commands import jobs
    from orchestrator.head.launch import launch as launching
    from orchestrator.head.launch.payload import CALL
    from orchestrator.head.plan.model import Target
    from orchestrator.launchers.slurm import allocation

    try:
        with launch_command.make_context("master_launch", []) as context:
            defaults = context.params
    except click.ClickException as error:  # of a variable such as NPROC_PER_NODE
        raise UsageError(error.format_message()) from error
    options = {**defaults, **request["options"], "quiet": True, "color": False}
    calls = request["parcel"] is not None
    options = paths(options)
    made = jobs.request_of(options, "" if calls else DEFAULT_CONFIG, DEFAULT_HOOK)
    given = allocation.chosen(None, options["nodes"], listed=request["listed"])
    if given is not None:
        given = replace(given, batch=False)  # the asking program may be its script, we are not
    made = replace(made, command=tuple(request["command"]), allocation=given)
    if calls:
        parcel = Path(request["parcel"])
        made = replace(made, target=Target("engine", CALL, ()), parcel=parcel)
    try:
        launched = launching.launch(made, lambda text: answers.tell(say=text))
    finally:
        if made.parcel is not None:
            shutil.rmtree(made.parcel, ignore_errors=True)
    place = launched.experiment
    speak_into(place)
    answers.tell(place=str(place.path))
    jobs.follow(place, launched.record, launched.ssh, options, launched)


def take_up(answers: Answers, request: dict[str, Any]) -> None:
    """Become the head of a job that has none, and say how much of its logs is yet to come."""
    from orchestrator.head.commands import jobs
    from orchestrator.head.status import status
    from orchestrator.records import experiment

    options = paths({**request["options"], "quiet": True, "color": False})
    place, record, ssh = jobs.at_home(options)
    elsewhere = record.batch or record.part_of  # its head can only be where its job is
    if record.over or elsewhere or place.lock() is not None:
        answers.tell(place=str(place.path), logs={})
        return
    record = place.read_record()
    states = [] if record.over else status.ask_nodes(ssh, record)
    sizes = {node.index: state.log_bytes or 0 for node, state in zip(record.nodes, states)}  # noqa: B905
    speak_into(place)
    answers.tell(place=str(place.path), logs=sizes)
    if not record.over:
        jobs.follow(place, replace(record, head=experiment.this_head()), ssh, options)


def stop(answers: Answers, request: dict[str, Any]) -> None:
    from orchestrator.head.commands import jobs
    from orchestrator.head.follow import stop as stopping

    place, _, found = jobs.end_job(paths(request["options"]))
    found = found or []
    why = stopping.conclude(place, found) if place is not None and found else ""
    told = [asdict(receipt) for receipt in found]
    answers.tell(
        receipts=told, code=stopping.exit_code(found), text=stopping.to_text(found), why=why
    )


def paths(options: dict[str, Any]) -> dict[str, Any]:
    """As the command line has them."""
    names = ("nodes", "ssh_config", "experiments", "config_file")
    found = {name: Path(options[name]) for name in names if options.get(name) is not None}
    return {**options, **found}


def speak_into(place: Experiment) -> None:
    """From now on there is no terminal: a file says what the head has to say."""
    with contextlib.suppress(OSError):  # a full disk
        fd = os.open(place.path / "head.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(1, f"orchestrator: {at}: process {os.getpid()} follows this job\n".encode())
