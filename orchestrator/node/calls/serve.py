"""The program of every rank of a Pool: calls the functions that are sent to it, one by one.

`Cluster.pool` starts `serve` as Cluster.run starts any function. A call comes through a socket in
the run directory from the node's server, which has it from the head; the answer goes back the same
way. Objects that outlive a call are kept here.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from orchestrator.node.job.ranks.run_function import text_of, unsendable
from orchestrator.node.job.run_directory import listen_in
from orchestrator.protocol import frames
from orchestrator.protocol.frames import (
    ASK,
    CLOSE,
    INTERRUPT,
    LINE,
    RAISED,
    READY,
    RESULT,
    RUN,
    SHOW,
)

PATIENCE_SECONDS = 300.0  # seconds to wait for a caller: nobody wants these ranks any more
READ_BYTES = 1 << 20
SKIPPED = (__file__,)  # frames of ours in a traceback

objects: dict[int, Any] = {}
kept = [b""]  # the pickle of a function that is called with many inputs


def create(number: int, kind: Callable[..., object], args: Any, kwargs: Any) -> None:
    objects[number] = kind(*args, **kwargs)


def call(number: int, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(objects[number], name)(*args, **kwargs)


def delete(number: int) -> None:
    objects.pop(number, None)


def keep(function: bytes) -> None:
    """Keep a function for the inputs that follow: it may hold much, and comes once."""
    kept[0] = function


def apply(call: Any) -> Any:
    """Call the function that is kept, each time as it came: what it changes does not stay."""
    import cloudpickle  # type: ignore[import-untyped,unused-ignore]

    function, _, _ = cloudpickle.loads(kept[0])
    return function(call)


def serve() -> None:
    """Serve callers until one says that it is over."""
    listener = listen_in(os.environ["ORCHESTRATOR_RUN"], f"calls_{os.environ['LOCAL_RANK']}", 1)
    listener.settimeout(PATIENCE_SECONDS)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            raise SystemExit(f"nobody has called for {PATIENCE_SECONDS:.0f} s") from None
        with connection:
            connection.settimeout(None)
            if Caller(connection).serve():
                return


class Caller:
    """The connection to the one who calls."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = int(os.environ["RANK"])
        self.splitter = frames.Splitter()
        self.arrived: list[frames.Part] = []
        self.number = 0  # of the call that is served
        self.running = False
        signal.signal(signal.SIGINT, self.interrupt)

    def serve(self) -> bool:
        """Answer calls; return whether this was the last caller."""
        while True:
            try:
                message = self.receive()
            except OSError:
                return False
            if message is None or message.kind == CLOSE:
                return message is not None
            self.number = message.number
            if message.kind == READY:
                self.answer(READY)
            elif message.kind == RUN:
                self.answer(*self.outcome(message.data))

    def receive(self) -> frames.Part | None:
        """Return the next whole message, or None if the caller is gone."""
        data = bytearray()
        while True:
            while self.arrived:
                part = self.arrived.pop(0)
                data += part.data
                if not part.more:
                    return part._replace(data=bytes(data))
            received = self.connection.recv(READ_BYTES)
            if not received:
                return None
            self.take(received)

    def take(self, received: bytes) -> None:
        self.arrived += (frames.part(load) for _, load in self.splitter.feed(received))

    def answer(self, kind: bytes, data: bytes = b"") -> None:
        for frame in frames.call_frames(self.rank, self.number, kind, data):
            self.connection.sendall(frame)

    def outcome(self, data: bytes) -> tuple[bytes, bytes]:
        """Make the call; return its result, or what it raised."""
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # the head's own version

        if "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self.debug
        try:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                if self.is_interrupted():
                    raise KeyboardInterrupt
                self.running = True
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                function, args, kwargs = cloudpickle.loads(data)
                result = function(*args, **kwargs)
                try:
                    return RESULT, cloudpickle.dumps(result)
                except Exception as error:  # noqa: BLE001  it is the user's own object
                    raise unsendable(result, error) from None
            finally:
                self.running = False
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        except BaseException as error:  # noqa: BLE001  the user's own code; sys.exit ends no rank
            return RAISED, described(cloudpickle, error)

    def is_interrupted(self) -> bool:
        """Was the call interrupted before it began? The signal comes after these words of it."""
        with contextlib.suppress(BlockingIOError):
            self.take(self.connection.recv(READ_BYTES, socket.MSG_DONTWAIT))
        return any((part.kind, part.number) == (INTERRUPT, self.number) for part in self.arrived)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in the call that runs, once; a rank that waits has none."""
        if self.running:
            self.running = False
            raise KeyboardInterrupt

    def debug(self, *_: object, **__: object) -> None:
        """Open a debugger, whose terminal is the caller's."""
        frame: FrameType | None = sys._getframe(1)
        terminal: Any = Terminal(self)
        debugger = pdb.Pdb(stdin=terminal, stdout=terminal, nosigint=True)
        debugger.prompt = f"(Pdb rank {self.rank}) "
        debugger.set_trace(frame)


class Terminal:
    """The caller's terminal, as far as a debugger needs one."""

    encoding = "utf-8"

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def write(self, text: str) -> int:
        self.caller.answer(SHOW, text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: all is sent at once."""

    def readline(self) -> str:
        self.caller.answer(ASK)
        message = self.caller.receive()
        if message is None or message.kind != LINE:
            return ""  # the end of the input: the debugger quits
        return message.data.decode(errors="replace")


def described(cloudpickle: Any, error: BaseException) -> bytes:
    """Pickle an exception, where a pickle reproduces its type, and its traceback as text."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in SKIPPED:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame))
    try:
        data = cloudpickle.dumps(error.with_traceback(None))
        if isinstance(error, SystemExit) or type(cloudpickle.loads(data)) is not type(error):
            data = None  # an exit is not the caller's
    except Exception:  # noqa: BLE001  it is the user's own object
        data = None
    return bytes(cloudpickle.dumps((data, f"{type(error).__name__}: {text_of(error)}", text)))
