"""Runs a command in a fork of the tests' own process, with what a test has changed."""

import fcntl
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator import entry
from orchestrator.head.screen import output

ROOT = Path(__file__).parents[1]


def typed(
    words: Sequence[str],
    cwd: Path,
    main: Callable[[], object] = entry.main,
    name: str = "orchestrator",
    **env: str,
) -> tuple[int, str, str]:
    """Return the exit code, the standard output and the standard error."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            streams = [output.fileno(), errors.fileno()]
            become([name, *words], cwd, {**os.environ, **env}, streams, main)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    assert "Traceback" not in texts[1], texts[1]
    return code, *texts


def become(
    words: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    streams: list[int],
    main: Callable[[], object],
) -> NoReturn:
    """Run the command as the installed program does; this process ends with it."""
    code = 1
    try:
        # Above 2 first: where the tests' process lacks one of these, a file may have its number.
        own = [os.open(os.devnull, os.O_RDONLY), *streams]
        files = [fcntl.fcntl(file, fcntl.F_DUPFD, 10) for file in own]
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in {*own, *files} - {0, 1, 2}:
            os.close(file)  # one that leaves its output has left it
        encoding = env.get("PYTHONIOENCODING", "utf-8")
        sys.stdin, sys.stdout = open(0), open(1, "w", encoding=encoding)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding=encoding, errors="backslashreplace", buffering=1
        )
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        # A new process has said nothing yet: an earlier test of this one may have.
        output.complain_once.cache_clear()
        main()
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001  the tests go on in the other process alone
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
