"""Makes one virtual environment from wheels that are here, by uv, or by venv and pip."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from orchestrator.common.hiding import redacted_text
from orchestrator.node.environments.place import Environments
from orchestrator.node.job.processes import in_words
from orchestrator.node.machine import tool
from orchestrator.node.transfer.code import snapshot
from orchestrator.node.transfer.code.store import Incomplete, Store
from orchestrator.protocol.requests.environments import BuildEnvironment, BuildProgress

LAST_LINES = 12
# What would lead uv or pip elsewhere than to the environment.
THEIRS = ("PIP_", "UV_", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")


class BuildError(Exception):
    """A step failed; its text is what the program said last."""


class Build:
    """The making of one environment, in a thread: the server goes on answering."""

    def __init__(self, request: BuildEnvironment) -> None:
        self.request = request
        self.here = Environments(request.root)
        self.step = "begins"
        self.problem = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = -1  # held by whoever writes into the environment
        self.over = False
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

    def end(self) -> None:
        """End what runs: the head is gone. The next bootstrap begins this environment anew."""
        self.over = True
        process = self.process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def _run(self) -> None:
        try:
            self.here.prepare()
            with open(f"{self.here.path(self.request.key)}.lock", "wb") as lock:
                self.step = "waits for another bootstrap"
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.lock = lock.fileno()
                if self.here.packages(self.request.key) is None:
                    self._make()
            self.here.link_all(self.request.name, self.request.key)
        except Incomplete:
            self.problem = "the wheels did not arrive whole: type the command again"
        except (BuildError, OSError, ValueError) as error:
            self.problem = in_words(error)

    def _make(self) -> None:
        key = self.request.key
        self.here.discard(key)
        self.step = "unpacks the wheels"
        store = Store()
        entries = store.tree(self.request.tree)
        name = f"environment-{key}-{os.urandom(4).hex()}"
        made = snapshot.make(store, name, "wheels", entries)
        root = os.fsdecode(made.root)
        try:
            wheels = sorted(os.path.join(root, n) for n in os.listdir(root) if n.endswith(".whl"))
            pinned = os.path.join(root, "pinned.txt")  # where the node downloads by itself
            what = ["--require-hashes", "-r", pinned] if os.path.exists(pinned) else []
            what = what or (["--no-index", "--no-deps", *wheels] if wheels else [])
            self._install(self.here.path(key), what, len(wheels), os.path.join(root, "uv"))
            self.here.seal(key)
        except BaseException:
            with contextlib.suppress(OSError):
                self.here.discard(key)
            raise
        finally:
            snapshot.remove(made.path)

    def _install(self, path: str, what: list[str], count: int, uv: str) -> None:
        python, packages = sys.executable, "from the index" if what else "nothing"
        if count:
            packages = f"{count} wheel{'s' * (count > 1)}"
        if self._runs(uv):
            self.step = f"uv installs {packages}"
            cache = f"{path}.cache"  # on the same disk, so that uv links and does not copy
            try:
                common = ["--no-config", "--cache-dir", cache, "--no-python-downloads"]
                self._call([uv, "venv", *common, "--no-project", "--python", python, path])
                into = ["--python", f"{path}/bin/python"]
                if what:
                    self._call([uv, "pip", "install", *common, *into, *what])
            finally:
                shutil.rmtree(cache, ignore_errors=True)
            return
        self.step = f"pip installs {packages}"
        self._call([python, "-m", "venv", path])
        pip = [f"{path}/bin/python", "-m", "pip", "--isolated", "--disable-pip-version-check"]
        if what:
            self._call([*pip, "install", "--no-cache-dir", *what])

    def _runs(self, uv: str) -> bool:
        """Return True if uv is there, for this processor and libc."""
        return not tool.run([uv, "--version"], 20.0).problem

    def _call(self, words: list[str]) -> None:
        if self.over:
            raise BuildError("the head left")
        env = {name: value for name, value in os.environ.items() if not name.startswith(THEIRS)}
        with tempfile.TemporaryFile() as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
                pass_fds=[self.lock],  # where our server is killed, it still writes
            )
            code = self.process.wait()
            output.seek(0)
            said = output.read().decode("utf-8", "replace").strip().splitlines()
        if code:
            program = os.path.basename(words[0])
            how = "failed:" if code > 0 else f"was ended from outside, by signal {-code}"
            text = redacted_text("\n".join(said[-LAST_LINES:]))
            raise BuildError(f"{program} {how}\n{text}".rstrip())
