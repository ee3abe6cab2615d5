"""A head in the background: a process of its own that outlives whoever started it.

Both ends of the pipe are here. The request is one line of JSON, the answers are lines of JSON. A
head then stays as long as its job: it reads keys from the pipe, as a command does from a terminal,
and writes its messages to head.txt of the experiment. It has no terminal and no connection of the
process that started it, and is no child of it: whatever ends that, a closed terminal or a notebook,
does not end the head.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator.common import errors, files
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.screen import output
from orchestrator.head.screen.keyboard import Keys

if TYPE_CHECKING:
    from orchestrator.config.launch import View, Where
    from orchestrator.records.experiment import Experiment

# Isolated, and then on the asking program's own path: no module of its directory gets in first.
START = "import json,sys;r=json.loads(sys.stdin.buffer.readline());h,p=r.pop('home'),r.pop('path');"
START += "sys.path[:]=[h][h in sys.path:]+sys.path+p;from {module} import main;main(r)"
HOME = str(Path(__file__).parents[3])  # where this very version of ours is found
INTERRUPT = b"\x03"
LEAVE = b"d"

log = logging.getLogger("orchestrator")


class Background:
    """The end of the pipe in the asking program."""

    module = __name__  # has the main() of the other end

    def __init__(self, do: str, **request: Any) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as we
        process = subprocess.Popen(
            # The last two show in ps.
            [sys.executable, "-I", "-c", START.format(module=self.module), "orchestrator", do],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C in our terminal is ours alone
        )
        assert process.stdin is not None and process.stdout is not None
        self.keys, self.answers = process.stdin, process.stdout
        self.process = process
        ours.add(self)
        asked = {"home": HOME, "path": sys.path, "do": do, **request}
        self.press(json.dumps(asked).encode() + b"\n")

    def __del__(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close our end of the pipes."""
        for name in ("keys", "answers", "errors"):
            with contextlib.suppress(AttributeError, OSError):  # it never began; it has ended
                getattr(self, name).close()

    def press(self, key: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and needs no key
            self.keys.write(key)
            self.keys.flush()

    def gone(self, seconds: float = 0.0) -> bool:
        """Wait at most so long for its end; tell whether it has ended. Later output is unread."""
        if self.answers.closed:
            return True
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
                urgent = message["say"].startswith("warning: ")
                log.log(logging.WARNING if urgent else logging.INFO, "%s", message["say"])
            elif "error" in message:
                raise getattr(errors, message["error"])(message["what"], message["fix"])
            else:
                return message

    def last_words(self) -> str:
        self.errors.seek(0)
        output = self.errors.read().decode(errors="replace").strip()[-2000:]
        return f"our background process ended without an answer{': ' + output if output else ''}"


ours: weakref.WeakSet[Background] = weakref.WeakSet()


def forked() -> None:
    """Close the pipes in a process that the asking program forked: they are not for it.

    It would keep them open when that program has hung up, and two would read the same answers.
    """
    for background in list(ours):
        for pipe in (background.keys, background.answers):
            # Not pipe.close(): a thread that is not here may hold its lock.
            pipe.raw.close()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=forked)

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


def serve(
    actions: dict[str, Callable[..., None]],
    request: dict[str, Any],
    keys: Callable[[], Keys] = Pipe,
) -> NoReturn:
    """Do what the request asks for, in a process that nobody waits for."""
    if os.fork():
        os._exit(0)
    from orchestrator.common import interrupt

    interrupt.answer_at_once()
    interrupt.before_exit(files.remove_unfinished)
    # The asking program may be Slurm's batch script; this process is not.
    os.environ.pop("ENVIRONMENT", None)
    answers = Answers()
    do = request.pop("do")
    try:
        actions[do](answers, keys(), **request)
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


def main(request: dict[str, Any]) -> NoReturn:
    serve({"take_up": take_up}, request)


def take_up(
    answers: Answers,
    keys: Pipe,
    where: dict[str, str | bool],
    experiment: str | None,
    left_behind: bool = False,
    on_purpose: bool = False,
) -> None:
    """Become the head of a job that has none, and say how much of its logs is yet to come.

    Whoever comes next takes over from it. Where another head left this one behind on purpose, the
    job does not depend on this one.
    """
    from orchestrator.head.commands.follow import follow_again
    from orchestrator.head.status import status
    from orchestrator.head.status.find_job import adopt_job
    from orchestrator.records.experiment import this_head

    job = adopt_job(where_of(where), experiment)
    told = {"place": str(job.experiment.path), "pid": os.getpid()}
    elsewhere = job.record.over or job.record.head_elsewhere
    if elsewhere or job.experiment.lock(background=True) is not None:
        answers.tell(**told, logs={})
        return
    record = job.experiment.read_record()
    states = [] if record.over or left_behind else status.ask_nodes(job.transport, record)
    sizes = {node.index: state.log_bytes or 0 for node, state in zip(record.nodes, states)}  # noqa: B905
    speak_into(job.experiment)
    answers.tell(**told, logs=sizes)
    if not record.over:
        record = replace(record, head=this_head())
        follow_again(
            *(job.experiment, record, job.transport, silent(), keys),
            where=None if left_behind else where_of(where),
            left_behind=left_behind,
            looks_on=on_purpose,
        )


def leave_behind(experiment: Experiment, where: Where, *, on_purpose: bool) -> str:
    """Start a head that goes on in the background; describe what becomes of the logs."""
    given = {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in asdict(where).items()
        if value
    }
    which: dict[str, Any] = {"experiment": str(experiment.path), "where": given}
    try:
        head = Background("take_up", **which, left_behind=True, on_purpose=on_purpose).answer()
    except (OrchestratorError, OSError) as error:
        return f"its logs stay on the nodes, for no head can go on in the background: {error}"
    return f"process {head['pid']} keeps writing its logs and its end here"


def where_of(where: dict[str, str | bool]) -> Where:
    from orchestrator.config.launch import Where

    given = {
        name: Path(value) if isinstance(value, str) else value for name, value in where.items()
    }
    return Where(**given)  # type: ignore[arg-type]


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
