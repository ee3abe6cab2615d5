"""Builds one virtual environment from wheels on this node, with uv, or with venv and pip."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading

from orchestrator.common.hiding import redacted_text
from orchestrator.node.environments.place import Environments
from orchestrator.node.job.processes import error_in_words
from orchestrator.node.machine import tool
from orchestrator.node.transfer import snapshot
from orchestrator.node.transfer.store import Store
from orchestrator.protocol.requests.environments import BuildEnvironment, BuildProgress
from orchestrator.protocol.timing import WORK_ANSWER_SECONDS

LAST_LINES = 12
# These variables would direct uv or pip to another environment.
THEIRS = ("PIP_", "UV_", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")


class BuildError(Exception):
    """A step failed; its text is the program's last output."""


class Build:
    """The build of one environment in a thread, so that the server goes on answering.

    A build ends with its server; the next bootstrap starts it from the beginning.
    """

    def __init__(self, request: BuildEnvironment, store: Store) -> None:
        self.request, self.store = request, store
        self.here = Environments()
        self.step = "begins"
        self.problem = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def progress(self) -> BuildProgress:
        if self.thread.is_alive():
            return BuildProgress(state="building", step=self.step)
        packages = self.here.packages(self.request.key) if not self.problem else None
        if packages is None:
            problem = self.problem or "the environment was changed while it was made"
            return BuildProgress(state="failed", step=self.step, problem=problem)
        return BuildProgress(state="ready", step=self.step, packages=packages)

    def _run(self) -> None:
        try:
            self.here.prepare()
            with open(f"{self.here.path(self.request.key)}.lock", "wb") as lock:
                self.step = "waits for another bootstrap"
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self.here.packages(self.request.key) is None:
                    self._make()
            self.here.link_all(self.request.name, self.request.key)
        except (BuildError, OSError, ValueError) as error:
            self.problem = error_in_words(error)

    def _make(self) -> None:
        key = self.request.key
        self.here.discard(key)
        self.step = "unpacks the wheels"
        entries = self.store.tree(self.request.tree)
        name = f"environment-{key}-{os.urandom(4).hex()}"
        path, root = snapshot.make_snapshot(self.store, name, "wheels", entries)
        try:
            self._install(self.here.path(key), os.fsdecode(root))
            self.here.seal(key)
        except BaseException:
            with contextlib.suppress(OSError):
                self.here.discard(key)
            raise
        finally:
            snapshot.remove_snapshot(path)

    def _install(self, path: str, root: str) -> None:
        """Install the wheels of a directory into a new virtual environment, with uv or pip."""
        wheels = sorted(os.path.join(root, n) for n in os.listdir(root) if n.endswith(".whl"))
        # This file exists if the node downloads the packages itself.
        pinned = os.path.join(root, "pinned.txt")
        what = ["--require-hashes", "-r", pinned] if os.path.exists(pinned) else []
        what = what or (["--no-index", "--no-deps", *wheels] if wheels else [])
        packages = (
            f"{len(wheels)} wheel{'s' * (len(wheels) > 1)}"
            if wheels
            else "from the index"
            if what
            else "nothing"
        )
        uv, python = os.path.join(root, "uv"), f"{path}/bin/python"
        # The program fails if it was built for another processor or libc.
        by_uv = not tool.run_tool([uv, "--version"], 20.0).problem
        if by_uv:
            # The cache is on the same disk, so that uv links files and does not copy them.
            common = ["--no-config", "--cache-dir", f"{path}.cache", "--no-python-downloads"]
            make = [uv, "venv", *common, "--no-project", "--python", sys.executable, path]
            install = [uv, "pip", "install", *common, "--python", python, *what]
        else:
            make = [sys.executable, "-m", "venv", path]
            pip = [python, "-m", "pip", "--isolated", "--disable-pip-version-check"]
            install = [*pip, "install", "--no-cache-dir", *what]
        self.step = f"{'uv' if by_uv else 'pip'} installs {packages}"
        try:
            for words in (make, install) if what else (make,):
                call_program(words)
        finally:
            shutil.rmtree(f"{path}.cache", ignore_errors=True)


def call_program(words: list[str]) -> None:
    output = tool.run_tool(words, WORK_ANSWER_SECONDS, without=THEIRS)
    if output.problem:
        said = (output.out + output.err).strip().splitlines()
        text = redacted_text("\n".join(said[-LAST_LINES:]))
        raise BuildError(f"{output.problem.partition(':')[0]}:\n{text}" if text else output.problem)
