"""Type `orchestrator ...` in a fork of the tests' own process, which has imported it already.

A Python that starts anew takes 0.2 s of a core; tests/cli/test_run.py tests the start itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator.cli.main import cli
from orchestrator.cli.run import run
from orchestrator.common import interrupt


def typed(words: Sequence[str], cwd: Path, **env: str) -> tuple[int, str, str]:
    """Return the exit code, the standard output and the standard error."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            become(words, cwd, env, [output.fileno(), errors.fileno()])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    assert "Traceback" not in texts[1], texts[1]
    return code, *texts


def become(words: Sequence[str], cwd: Path, env: dict[str, str], streams: list[int]) -> NoReturn:
    """Run the command as the installed program does; this process ends with it."""
    code = 1
    try:
        for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
            os.dup2(file, number)
        encoding = env.get("PYTHONIOENCODING", "utf-8")
        sys.stdin, sys.stdout = open(0), open(1, "w", encoding=encoding)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace")  # noqa: SIM115
        os.chdir(cwd)
        os.environ.update(env)
        sys.argv = ["orchestrator", *words]
        interrupt.answer_at_once()
        run(cli, "orchestrator")
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001  the tests go on in the other process alone
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
