"""Runs tools of the machine (nvidia-smi, git, dmesg), each with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.node.job.ranks.agent_start import PR_SET_PDEATHSIG, prctl

# The limit of the output that is kept.
MOST_BYTES = 4 << 20
# A tool that takes longer to end after SIGKILL is stuck in a driver.
DIES_SECONDS = 1.0
CLEAN = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}


class Output(NamedTuple):
    """The output of a tool; `problem` is empty if it ended by itself with exit code 0."""

    out: str
    problem: str
    err: str = ""


def run_tool(
    argv: Sequence[str], seconds: float, env: Mapping[str, str] = {}, without: tuple[str, ...] = ()
) -> Output:
    """Run a tool; return its output, or the reason why there is none.

    Its environment is this one with `env`, without variables that start with a prefix in `without`.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(without)}
    name = os.path.basename(argv[0])
    # Files, not pipes: a child that the tool leaves behind could hold a pipe open forever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**inherited, **CLEAN, **env},
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except FileNotFoundError:
            return Output("", f"{name} is not installed")
        except OSError as error:
            return Output("", f"{name} cannot be run: {error.strerror}")
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Output("", kill_tool(process, name, seconds))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(MOST_BYTES).decode("utf-8", "replace"))
    if code == 0:
        return Output(texts[0], "")
    lines = (texts[1].strip() or texts[0].strip()).splitlines()
    last = f": {' '.join(lines[:3])[:300]}" if lines else ""
    return Output(texts[0], f"{name} ended with exit code {code}{last}", texts[1])


def kill_tool(process: subprocess.Popen[bytes], name: str, seconds: float) -> str:
    """Kill a late tool and its children; return the problem as text."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(DIES_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{name} hangs in the kernel: not even SIGKILL ends it"
    return f"{name} did not end within {seconds:g} s"
