"""Set up the package's logger: for standard error, and for the head.log of a job.

Nothing is set up before a command asks for it: records below WARNING go nowhere until then. The
head alone uses this. On the nodes, which do without `logging` for the sake of a quick start, it is
node/job/run_directory.py that writes such lines.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from orchestrator.common import files, hiding

PACKAGE = logging.getLogger("orchestrator")
# The logger below "paramiko" that a connection uses: a level of its own wins over that one's.
PARAMIKO = logging.getLogger("paramiko.transport")
# A head.log of this size is moved to head.log.1.
LARGEST_BYTES = 8 << 20
# A start's records are held until its job has a directory; 64 nodes write 1,000.
MOST_HELD = 5000
LINE = "%(asctime)s.%(msecs)03d %(levelname)-7s %(place)s: %(message)s"
TIME, DATE_AND_TIME = "%H:%M:%S", "%Y-%m-%d %H:%M:%S"

_environment = hiding.secrets_of_environment(os.environ)


class Formatter(logging.Formatter):
    """Writes a record on a line: its time, where it comes from, its words without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        # A log line names its thread, except the main one.
        place = record.name.removeprefix("orchestrator.").removeprefix("head.")
        thread = f" ({record.threadName})" * (record.threadName != "MainThread")
        record.__dict__["place"] = place + thread
        return hiding.without_secrets(
            hiding.hide_secrets(hiding.redacted_text(super().format(record)), _environment)
        )


class TerminalHandler(logging.Handler):
    """Writes lines by a function, which knows of a line on the terminal that moves.

    A record with the attribute `shown` is skipped: the terminal has its words already.
    """

    def __init__(self, level: int, write: Callable[[str], None]) -> None:
        super().__init__(level)
        self.setFormatter(Formatter(LINE, TIME))
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "shown"):
            self.write(self.format(record))


class Held(logging.Handler):
    """Holds the newest records until it is known which file they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.records: collections.deque[logging.LogRecord] = collections.deque(maxlen=MOST_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class HeadLog(RotatingFileHandler):
    """Writes the head.log of a job, for its owner alone; where that fails the job goes on."""

    def __init__(self, path: Path, largest: int = LARGEST_BYTES) -> None:
        super().__init__(path, maxBytes=largest, backupCount=1, delay=True, encoding="utf-8")
        self.setFormatter(Formatter(LINE, DATE_AND_TIME))

    def _open(self) -> TextIOWrapper:
        descriptor = files.open_to_append(self.baseFilename)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Return True for a full file; logging's own would format each record a second time."""
        return (
            self.stream is not None and 0 < self.maxBytes <= os.fstat(self.stream.fileno()).st_size
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over a line that cannot be written."""


def remove(kind: type[logging.Handler], logger: logging.Logger = PACKAGE) -> None:
    """Remove the handlers of a kind, and close them."""
    for handler in [each for each in logger.handlers if isinstance(each, kind)]:
        logger.removeHandler(handler)
        # The disk of a head.log may be full.
        with contextlib.suppress(OSError):
            handler.close()


# -- for standard error -----------------------------------------------------------------------


def show_log_on_terminal(level: int, write: Callable[[str], None]) -> None:
    """Show records from a level on; those of paramiko at DEBUG, else its warnings alone."""
    for logger, least in (
        (PACKAGE, level),
        (PARAMIKO, level if level == logging.DEBUG else logging.WARNING),
    ):
        remove(TerminalHandler, logger)
        logger.addHandler(TerminalHandler(level, write))
        logger.setLevel(least)


# -- for a job --------------------------------------------------------------------------------


def hold_lines() -> None:
    """Hold what is logged from now on for the head.log of a job that has no directory yet."""
    PACKAGE.setLevel(logging.DEBUG)
    if not is_holding_lines():
        PACKAGE.addHandler(Held())


def write_log_to(path: Path) -> None:
    """Write what is logged, and what was held, into this head.log.

    What was held is kept for another one, if this job's directory is discarded again.
    """
    handler = HeadLog(path)
    if [handler.baseFilename] == [
        each.baseFilename for each in PACKAGE.handlers if isinstance(each, HeadLog)
    ]:
        return
    remove(HeadLog)
    PACKAGE.setLevel(logging.DEBUG)
    held = [each for each in PACKAGE.handlers if isinstance(each, Held)]
    for record in [record for each in held for record in each.records]:
        handler.handle(record)
    PACKAGE.addHandler(handler)


def is_holding_lines() -> bool:
    """Return True until stop_holding_lines()."""
    return any(isinstance(each, Held) for each in PACKAGE.handlers)


def stop_holding_lines() -> None:
    """Hold nothing more: the job has started, and its directory stays."""
    remove(Held)


def append_line(path: Path, name: str, text: str, *values: object) -> None:
    """Append a line to the head.log of a job that another process follows."""
    if not path.parent.is_dir():
        return
    # The head that follows the job rotates the file.
    handler = HeadLog(path, largest=0)
    handler.handle(PACKAGE.makeRecord(name, logging.INFO, "", 0, text, values, None))
    handler.close()
