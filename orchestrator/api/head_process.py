"""A process that does for a Python program what a command does, and outlives that program.

Both ends of the pipe are here. The request is one line of JSON, the answers are lines of JSON. A
head then stays as long as its job: it reads keys from the pipe, as a command does from a terminal,
and writes its messages to head.txt of the experiment. So the calling program, which may be a
notebook, opens no connection and has no thread, signal handler or child of ours: whatever ends a
notebook's children does not end its jobs.
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
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator import errors, files
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.head.screen import output
from orchestrator.head.screen.keyboard import Keys

if TYPE_CHECKING:
    from orchestrator.config.launch import View, Where
    from orchestrator.records.experiment import Experiment

# Isolated, and then on the asking program's own path: no module of its directory gets in first.
START = "import json,sys;r=json.loads(sys.stdin.buffer.readline());sys.path[:]=r.pop('path');"
START += "from orchestrator.api.head_process import main;main(r)"
INTERRUPT = b"\x03"
LEAVE = b"d"

log = logging.getLogger("orchestrator")


class Background:
    """The end of the pipe in the asking program."""

    def __init__(self, do: str, **request: Any) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as we
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, "orchestrator", do],  # the last two show in ps
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
        with contextlib.suppress(BrokenPipeError):  # it has ended, and needs no key
            self.keys.write(key)
            self.keys.flush()

    def gone(self, seconds: float = 0.0) -> bool:
        """Wait at most so long for its end; tell whether it has ended. Later output is unread."""
        poll = select.poll()
        poll.register(self.answers, 0)
        return bool(poll.poll(seconds * 1000))

    def answer(self) -> dict[str, Any]:
        """Return its next answer; an error is raised here as it was there."""
        while True:
            line = self.answers.readline()
            self.process.wait()  # it has left its child behind, and is no child of ours
            if not line:
                raise OrchestratorError(self.last_words())
            message: dict[str, Any] = json.loads(line)
            if "say" in message:
                log.info("%s", message["say"])
            elif "error" in message:
                raise getattr(errors, message["error"])(message["what"], message["fix"])
            else:
                return message

    def last_words(self) -> str:
        self.errors.seek(0)
        output = self.errors.read().decode(errors="replace").strip()[-2000:]
        return f"our background process ended without an answer{': ' + output if output else ''}"


# -- the other end --------------------------------------------------------------------------------


class Pipe(Keys):
    """Keys from the pipe; Ctrl-C becomes a signal, as on a terminal."""

    def __init__(self) -> None:
        super().__init__()
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

    def pressed(self) -> str:
        return "" if self.typed.empty() else self.typed.get()


class Answers:
    """Answers to the calling program, as long as it is there."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="ascii")
        os.dup2(2, 1)  # other output must not be taken for an answer

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()


def main(request: dict[str, Any]) -> NoReturn:
    if os.fork():
        os._exit(0)
    from orchestrator import interrupt

    interrupt.answer_at_once()
    # The asking program may be Slurm's batch script; this process is not.
    os.environ.pop("ENVIRONMENT", None)
    answers = Answers()
    actions: dict[str, Callable[..., None]] = {
        **{"launch": launch, "take_up": take_up, "stop": stop, "nodes": nodes},
    }
    do = request.pop("do")
    try:
        actions[do](answers, Pipe(), **request)
    except OrchestratorError as error:
        kind = next(
            parent for parent in type(error).__mro__ if parent.__module__ == errors.__name__
        )
        answers.tell(error=kind.__name__, what=error.what, fix=error.fix)
        output.complain(f"orchestrator: {error}")  # into head.txt, once it is the head of a job
    except OSError as error:  # a full disk, most of all
        where = f"{error.filename}: " if error.filename else ""
        answers.tell(error="OrchestratorError", what=f"{where}{error.strerror}", fix="")
    except BaseException:  # noqa: BLE001  a defect of ours: Background.last_words shows it
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    interrupt.leave(0)


def launch(
    answers: Answers, keys: Pipe, arguments: list[str], command: list[str], payload: str | None
) -> None:
    """Do what `master_launch` does with these arguments, or run the function in `payload`."""
    import click

    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.commands.follow import follow_launched
    from orchestrator.head.launch import launch as launching
    from orchestrator.head.launch.nodes import reach_all
    from orchestrator.head.launch.prepare import prepare
    from orchestrator.head.launch.request import resolve

    directory = None if payload is None else Path(payload)
    try:
        launch_args = replace(launch_arguments(arguments), payload=directory)
        request = resolve(launch_args, command)
        prepared = prepare(request, reach_all(request))
        launched = launching.launch(prepared, lambda text: answers.tell(say=text))
    except click.ClickException as error:  # of a variable such as NPROC_PER_NODE
        raise UsageError(error.format_message()) from error
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    speak_into(launched.experiment)
    answers.tell(place=str(launched.experiment.path))
    follow_launched(launched, silent(), keys)


def take_up(answers: Answers, keys: Pipe, where: dict[str, str], experiment: str | None) -> None:
    """Become the head of a job that has none, and say how much of its logs is yet to come."""
    from orchestrator.head.commands.follow import follow_again
    from orchestrator.head.status import status
    from orchestrator.head.status.find_job import adopt_job
    from orchestrator.records.experiment import this_head

    job = adopt_job(where_of(where), experiment)
    directory = str(job.experiment.path)
    if job.record.over or job.record.head_elsewhere or job.experiment.lock() is not None:
        answers.tell(place=directory, logs={})
        return
    record = job.experiment.read_record()
    states = [] if record.over else status.ask_nodes(job.transport, record)
    sizes = {node.index: state.log_bytes or 0 for node, state in zip(record.nodes, states)}  # noqa: B905
    speak_into(job.experiment)
    answers.tell(place=directory, logs=sizes)
    if not record.over:
        record = replace(record, head=this_head())
        follow_again(job.experiment, record, job.transport, silent(), keys)


def stop(
    answers: Answers, keys: Pipe, where: dict[str, str], experiment: str, grace: float | None
) -> None:
    from orchestrator.head.commands.stop import end_job
    from orchestrator.head.follow import stop as stopping

    ended = end_job(where_of(where), experiment, grace)
    receipts = ended.receipts or []
    answers.tell(
        receipts=[asdict(receipt) for receipt in receipts],
        code=stopping.exit_code(receipts),
        text=stopping.to_text(receipts),
        why=ended.problem,
    )


def nodes(answers: Answers, keys: Pipe, arguments: list[str]) -> None:
    """Describe the machines, as `orchestrator nodes --json` does."""
    from orchestrator.cli.launch import launch_arguments
    from orchestrator.head.inventory import machine
    from orchestrator.head.launch.machines import find_machines
    from orchestrator.head.launch.request import resolve

    machines = find_machines(resolve(launch_arguments(arguments)))
    answers.tell(nodes=[machine.to_json(described) for described in machines])


def where_of(paths: dict[str, str]) -> Where:
    from orchestrator.config.launch import Where

    return Where(**{name: Path(path) for name, path in paths.items()})  # type: ignore[arg-type]


def silent() -> View:
    from orchestrator.config.launch import View

    return View(quiet=True, color=False)


def speak_into(experiment: Experiment) -> None:
    """Send what the head prints to a file: there is no terminal any more."""
    with contextlib.suppress(OSError):  # a full disk
        fd = files.open_to_append(experiment.path / "head.txt")
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(fd, f"orchestrator: {at}: process {os.getpid()} follows this job\n".encode())
        os.close(fd)
