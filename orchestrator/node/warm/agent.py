"""Waits as the process that becomes torchrun: torch is imported, and no job is known yet.

Everything that a cold start would have set before its first line (environment, arguments, limits,
directory, files) is set when the job comes; where that cannot be, the process executes the cold
start in its place. The ranks are forked from this process, so it imports nothing of ours.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import itertools
import locale
import multiprocessing
import os
import select
import signal
import site
import socket
import sys
import time
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

if TYPE_CHECKING:
    from orchestrator.node.job.ranks import agent_start, fast_torchrun, process_title
    from orchestrator.node.job.ranks.agent_start import AgentStart
    from orchestrator.node.warm import frames
else:

    def load(name: str, *directory: str) -> types.ModuleType:
        """Load a file of ours without a trace in sys.modules: the ranks would see it."""
        module = types.ModuleType("orchestrator_" + name)
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), *directory, name + ".py")
        importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
        return module

    frames = load("frames")
    agent_start = load("agent_start", os.pardir, "job", "ranks")
    fast_torchrun = load("fast_torchrun", os.pardir, "job", "ranks")
    process_title = load("process_title", os.pardir, "job", "ranks")

# A package that reads one of these when it is imported has to be imported by each rank itself.
OF_A_RANK = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NODE_IP", "NNODES", "NPROC_PER_NODE"),
    *("ORCHESTRATOR_JOB", "ORCHESTRATOR_EXPERIMENT", "ORCHESTRATOR_RUN"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
}


class Reading(os._Environ):  # type: ignore[type-arg]
    """os.environ, which notes the names that are asked for, and who lists them all.

    A list is no question for every name on it: it may be a copy for another process. Who makes one
    at its import (tqdm, fsspec) looks there for names that begin with its own.
    """

    names: ClassVar[set[str]] = set()
    unfit: ClassVar[dict[str, str]] = {}  # package -> what it has asked, of what only a rank has
    listed_by: ClassVar[set[str]] = set()  # packages
    listing: ClassVar[tuple[types.FrameType | None, int]] = (None, 0)

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str) and self.caller() != Reading.listing:
            self.note(name)
        return super().__getitem__(name)

    def __contains__(self, name: Any) -> bool:
        if isinstance(name, str):
            self.note(name)
        return super().__contains__(name)

    def __iter__(self) -> Any:
        Reading.listing = frame, _ = self.caller()
        if frame is not None:
            Reading.listed_by.add(frame.f_globals.get("__name__", "").partition(".")[0])
        return super().__iter__()

    def note(self, name: str) -> None:
        """Note who asks, and who imports whoever asks."""
        Reading.names.add(name)
        frame = self.caller()[0] if name in OF_A_RANK else None
        while frame is not None:
            Reading.unfit.setdefault(frame.f_globals.get("__name__", "").partition(".")[0], name)
            frame = frame.f_back

    def caller(self) -> tuple[types.FrameType | None, int]:
        """Return which line asks, behind what Python has between it and us."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and (
            frame.f_globals is globals()
            or frame.f_globals.get("__name__") in ("os", "collections.abc")
        ):
            frame = frame.f_back
        return frame, frame.f_lineno if frame else 0


class Unfit(Exception):
    """Raised where forks of this process would not be what a cold start makes."""

    def __init__(self, reason: str, *packages: str) -> None:
        super().__init__(reason)
        self.packages = packages  # without which it may go well


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    if sys.flags.no_site:
        begin(control)
    order, files = frames.receive(control)
    fast_torchrun.begin_path_here()  # not with this file's directory, which is ours
    try:
        while "command" not in order:
            if "modules" in order:  # once, and again when a later job has imported more
                frames.send(control, imported(order["modules"], tuple(order["skip"]), control))
            order, files = frames.receive(control)
    except (EOFError, OSError):
        sys.exit()  # nobody needs it any more
    control.close()
    become(order, *files)
    torchrun = sys.modules["torch.distributed.run"]
    fast_torchrun.run(torchrun)


def begin(control: socket.socket) -> NoReturn:
    """Do what Python does at its start, watched; then start it again, as every other is started.

    A sitecustomize, a usercustomize or a .pth file may read any variable: the new process has those
    that were read, and a job with others of these starts cold.
    """
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # a program is not known yet
    with watched():
        site.main()
    reader = next(iter(Reading.unfit), "")
    if reader:
        reason = f"{reader} reads {Reading.unfit[reader]} when Python starts"
        frames.send(control, {"unfit": reason, "packages": ()})
    frames.send(control, {"start": time.time(), **what_was_read()})
    order: dict[str, Any] = {}
    try:
        while "begin" not in order:
            order, _ = frames.receive(control)
    except (EOFError, OSError):
        sys.exit()
    environment = {respelt(name): respelt(value) for name, value in order["environment"].items()}
    start_cold([respelt(word) for word in order["begin"]], environment)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Note what is read of the environment."""
    environ: Any = os.environ
    environ.__class__ = Reading
    try:
        yield
    finally:
        environ.__class__ = os._Environ
        Reading.listing = (None, 0)


def what_was_read() -> dict[str, list[str]]:
    return {"reads": sorted(Reading.names), "lists": sorted(Reading.listed_by)}


def imported(modules: list[str], skip: tuple[str, ...], control: socket.socket) -> dict[str, Any]:
    """Import these, and report what that has read; or why no job can start from here."""
    gc.disable()  # as in a cold start
    try:
        with watched():
            warm_up(modules, skip, control)
    except Unfit as error:
        return {"unfit": str(error), "packages": error.packages}
    gc.freeze()
    gc.enable()
    return {"ready": time.time(), **what_was_read(), "files": files_it_came_from()}


def warm_up(modules: list[str], skip: tuple[str, ...], control: socket.socket) -> None:
    """Import torch, and what the last job's program had of other packages.

    All that read what only a rank has are found in one go. When a job comes, it is enough.
    """
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    if "torch" not in sys.modules:
        examine("what Python imports at its start", handlers)
    importlib.import_module("torch.distributed.run")
    examine("torch", handlers)
    before = seen_by_all()
    packages = {name.partition(".")[0] for name in modules}
    unfit: dict[str, str] = {}
    for name in modules:
        package = name.partition(".")[0]
        if name in sys.modules or package in skip or package in unfit:
            continue
        if select.select([control], [], [], 0)[0]:
            frames.receive(control)
            break
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  the program itself will say what is wrong with it
            unfit[package] = f"{name} cannot be imported"
        for reader in Reading.unfit.keys() & packages:
            unfit[reader] = f"{reader} reads {Reading.unfit[reader]} when it is imported"
        try:
            examine(package, handlers)
            before = unchanged(before, package)
        except Unfit as error:
            raise Unfit(str(error), *{**unfit, package: ""}) from None
    if unfit:
        raise Unfit(next(iter(unfit.values())), *unfit)


def examine(package: str, handlers: dict[int, Any]) -> None:
    """Refuse a process that is not a quiet one with one thread."""
    if len(os.listdir("/proc/self/task")) > 1:
        # OpenBLAS has threads from its import on, which a fork ends (and so would that of a rank).
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        raise Unfit(f"{package} starts threads when it is imported")
    for name in os.listdir("/proc/self/fd"):
        try:
            held = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if held.startswith("socket:") and name != sys.argv[1]:
            raise Unfit(f"{package} opens sockets when it is imported")
    if device := agent_start.live_context():
        raise Unfit(f"{package} opens {device} when it is imported")
    torch = sys.modules.get("torch")
    if torch is not None and "cuda" in vars(torch) and torch.cuda.is_initialized():
        raise Unfit(f"{package} initialises CUDA when it is imported")
    changed = [n for n, handler in handlers.items() if signal.getsignal(n) != handler]
    if changed:
        raise Unfit(f"{package} handles signal {changed[0]:d} when it is imported")


def seen_by_all() -> dict[str, Any]:
    """Return what a program would find changed by a package that it never imports itself."""
    hooks = [name for name in dir(sys) if name.endswith("hook")]
    return {
        "variables": dict(os.environ),
        "the path": list(sys.path),
        "the finders of modules": list(map(str, sys.meta_path)),
        "hooks of the interpreter": {name: id(getattr(sys, name)) for name in hooks},
        "the limit of recursion": sys.getrecursionlimit(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the directory": os.getcwd(),
        "builtins": len(vars(builtins)),
        "threads' switch interval": sys.getswitchinterval(),
        "timeouts of sockets": socket.getdefaulttimeout(),
        "how processes are started": multiprocessing.get_start_method(allow_none=True),
    }


def unchanged(before: dict[str, Any], package: str) -> dict[str, Any]:
    """Return what all see now; refuse where a package has changed it."""
    now = seen_by_all()
    changed = [what for what, value in now.items() if value != before[what]]
    if changed:
        raise Unfit(f"{package} changes {changed[0]} when it is imported")
    return now


def files_it_came_from() -> dict[str, list[int]]:
    """Return each file that was imported, and what says where to look for them, as it is now."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {path for path in files if isinstance(path, str)}  # of packages, and what they import
    places = sys.path[1:]  # a package that comes or goes changes its directory
    places += site.getsitepackages()  # one that is made later is searched from then on
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    paths.update(places, [os.path.join(sys.prefix, "pyvenv.cfg")])
    for place in places:
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(place) if name.endswith(".pth")]
            paths.update(os.path.join(place, name) for name in names)
    return {path: frames.mark(path) for path in paths}


def become(order: dict[str, Any], output: int) -> None:
    """Be what a cold start is before its first line; where that cannot be, execute it."""
    order["directory"] = respelt(order["directory"])
    agent_start.settle(cast("AgentStart", order))
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    environment = {respelt(name): respelt(value) for name, value in order["environment"].items()}
    command = [respelt(word) for word in order["command"]]
    # What stands first in this memory stays there: C code may have kept pointers to it.
    before = executed_with()
    kept = itertools.takewhile(lambda item: environment.get(item[0]) == item[1], before.items())
    shown = {**dict(kept), **environment}
    changed = {n: v for n, v in os.environ.items() if before.get(n) != v}
    removed = before.keys() - os.environ.keys()
    os.environ.clear()
    os.environ.update({n: v for n, v in environment.items() if n not in removed})
    os.environ.update(changed)
    if not process_title.show_environment(shown):
        start_cold(command, environment)
    process_title.show_command(command)
    time.tzset()
    sys.argv = command[2:]
    if hasattr(sys, "orig_argv"):  # since Python 3.10
        sys.orig_argv = command
    sys.path_importer_cache.pop(sys.path[0], None)


def executed_with() -> dict[str, str]:
    """Return the environment that this process began with.

    Its start, torch and packages may have changed it: Python sets LC_CTYPE in the locale C.
    """
    with open("/proc/self/environ", "rb") as file:
        lines = (line.partition(b"=") for line in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in lines if equals}


def respelt(word: str) -> str:
    """Spell a word as this Python reads it in its own locale; it came as UTF-8."""
    return os.fsdecode(word.encode("utf-8", "surrogateescape"))


def start_cold(command: list[str], environment: dict[str, str]) -> NoReturn:
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
