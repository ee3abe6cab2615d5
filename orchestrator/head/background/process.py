"""A background process that outlives its parent, and the pipe between the two.

The process calls a function, which is sent with its arguments as a pickle. The answers are lines
of JSON. Keys are sent as a terminal would send them. The process is in a session of its own and is
not a child of the parent: the end of a terminal or a notebook does not end it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from orchestrator.common import errors, files
from orchestrator.common.errors import OrchestratorError
from orchestrator.head.screen import output
from orchestrator.head.screen.keyboard import Keyboard

PROGRAM = str(Path(__file__).with_name("entry.py"))
# The directory that contains this very version of the package.
HOME = str(Path(__file__).parents[3])
INTERRUPT = b"\x03"

log = logging.getLogger("orchestrator")


class Background:
    """The parent's end of the pipe; the background process calls `do`."""

    def __init__(self, do: Callable[..., None], **arguments: Any) -> None:
        # It stays open for as long as this object.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            # The last two show in ps.
            [sys.executable, "-I", PROGRAM, "orchestrator", do.__name__.replace("_", " ")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # Ctrl-C in our terminal must not reach the process.
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self.keys, self.answers = process.stdin, process.stdout
        self.process = process
        ours.add(self)
        place = json.dumps([HOME, sys.path]).encode() + b"\n"
        self.press(place + pickle.dumps((do, arguments)))

    def __del__(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close our end of the pipes."""
        for name in ("keys", "answers", "errors"):
            # The constructor may have failed, or the process may have ended.
            with contextlib.suppress(AttributeError, OSError):
                getattr(self, name).close()

    def press(self, key: bytes) -> None:
        # A process that has ended needs no key.
        with contextlib.suppress(BrokenPipeError):
            self.keys.write(key)
            self.keys.flush()

    def gone(self, seconds: float = 0.0) -> bool:
        """Return True if the process has ended, after waiting up to `seconds`, reading nothing."""
        if self.answers.closed:
            return True
        poll = select.poll()
        poll.register(self.answers, 0)
        return bool(poll.poll(seconds * 1000))

    def answer(self, say: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Return its next answer; an error is raised here as it was there.

        The words of its events before go to `say`, or into the log.
        """
        while True:
            line = self.answers.readline()
            # It has forked and exited: the grandchild, which answers, is not our child.
            self.process.wait()
            if not line:
                raise OrchestratorError(self.last_words())
            message: dict[str, Any] = json.loads(line)
            if "event" in message and say is not None:
                say(message["words"])
            elif "event" in message:
                words = output.printable_text(message["words"])
                log.log(message["level"], "%s: %s", message["event"], words)
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
    """Close the pipes in a forked child of the parent program, which must not use them.

    It would keep them open when that program has hung up, and two would read the same answers.
    """
    for background in list(ours):
        for pipe in (background.keys, background.answers):
            # Not pipe.close(): a thread that is not here may hold its lock.
            pipe.raw.close()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=forked)

# -- the other end --------------------------------------------------------------------------------


class Pipe(Keyboard):
    """Keys from the pipe; Ctrl-C becomes a signal, as on a terminal.

    With `needs_asker`, so does the end of the process that asked.
    """

    def __init__(self, *, needs_asker: bool = False) -> None:
        super().__init__()
        self.needs_asker = needs_asker
        self.typed: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while key := sys.stdin.buffer.read(1):
            if key == INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                self.typed.put(key.decode("ascii", "replace"))
        if self.needs_asker:
            os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> Pipe:
        return self

    def pressed(self) -> str:
        return "" if self.typed.empty() else self.typed.get()


class Hears(Protocol):
    """Receives progress messages of a background process."""

    def send(self, **message: Any) -> None: ...


class Answers:
    """Sends answers to the parent program; they are dropped once it has ended."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="ascii")
        # Other output must not be taken for an answer.
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()


def serve_function(do: Callable[..., None], arguments: dict[str, Any]) -> NoReturn:
    """Call the function in a process that outlives the parent program."""
    if os.fork():
        os._exit(0)
    from orchestrator.common import interrupt

    interrupt.install_handlers()
    interrupt.call_before_exit(files.remove_unfinished)
    # The asking program may be Slurm's batch script; this process is not.
    os.environ.pop("ENVIRONMENT", None)
    answers = Answers()
    try:
        do(answers, **arguments)
    except OrchestratorError as error:
        kind = next(
            parent for parent in type(error).__mro__ if parent.__module__ == errors.__name__
        )
        answers.send(error=kind.__name__, what=error.what, fix=error.fix)
        # stderr is head.txt once this process is the head of a job.
        output.complain(f"orchestrator: {error}")
    # The most likely cause is a full disk.
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answers.send(error="OrchestratorError", what=f"{where}{error.strerror}", fix="")
    # Background.last_words shows a defect of this program.
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    interrupt.exit_at_once(0)
