"""Notes where a rank writes, so that the end of its job can say what stays on its node.

An audit hook hears of each file that Python opens for writing and of each directory that it makes,
before that happens; torch, safetensors and h5py open theirs in C code and are listened to by
themselves. A process that the rank forks goes on with it, one that multiprocessing spawns begins
with it. Of other programs, also those that the rank starts, only the paths on their command lines
are known, which the node looks at when the job is over. An event that matters to nobody costs
0.13 us.
Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

NEW, KNOWN, FILE = "new", "known", "file"  # a directory that it makes; one that was there; a file
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MOST_NOTES = 200  # of one process
MOST_BYTES = 1 << 18  # of all processes of a rank
MOST_OF_DIRECTORY = 20  # files that are named one by one
MOST_SEEN = 10_000
SYSTEM = ("/dev", "/proc", "/sys", "/run")
TEMPORARY = ("/tmp", "/var/tmp")
# What libraries leave there for themselves, and what tempfile calls what nobody gave a name.
NAMELESS = re.compile(r"tmp[a-z0-9_]{8}\b|\.|pymp-|torchelastic_|torchinductor_")
# Variables that name a place of libraries: what they keep there is no result of the program.
OF_LIBRARIES = re.compile(
    r"\w*CACHE\w*|(HF|TORCH|TRITON|KERAS|NLTK)_HOME|XDG_\w+|MPLCONFIGDIR|TMPDIR|TEMP|TMP"
)
# Module -> its functions that open a file in C code, and which of their arguments is the path.
IN_C_CODE: dict[str, tuple[tuple[str, int], ...]] = {
    "torch._C": (("PyTorchFileWriter.__init__", 1), ("ScriptModule.save", 1)),
    "safetensors": (("serialize_file", 1),),  # before safetensors.torch takes it from there
    "h5py._hl.files": (("make_fid", 0),),
}
BETWEEN_WORDS = re.compile(r"[\s;|&<>()'\"`]+")  # of a shell's command
MOST_WORDS = 200  # of one command line
SPAWN = "multiprocessing.spawn"
BEGIN = """
try:
    from importlib.machinery import SourceFileLoader as loader
    from types import ModuleType
    watch = ModuleType("orchestrator_written_paths")
    loader(watch.__name__, {file!r}).exec_module(watch)
    watch.watch({notes!r}, {workdir!r})
except Exception:
    pass
"""


class Watch:
    """Notes the places that this process writes to, each once, and not too many."""

    def __init__(self, notes: str, workdir: str) -> None:
        self.notes = notes  # a file in the run directory
        self.workdir = os.path.realpath(workdir)
        self.ours = os.path.join(os.path.realpath(notes + "/../../../.."), "")
        self.home = os.path.expanduser("~")
        self.left = MOST_NOTES
        self.seen: set[str] = set()
        self.made: set[str] = set()  # what is in these is noted with them
        self.counts: dict[str, int] = {}
        self.pending = {*IN_C_CODE, SPAWN}
        self.events: dict[str, Callable[..., None]] = {
            "open": self.opened,
            "os.mkdir": self.makes,
            "os.rename": self.moves,
            "os.link": self.moves,
            "os.symlink": self.moves,
            "sqlite3.connect": self.writes,
            "subprocess.Popen": self.starts,
            "os.system": lambda command: self.starts("", [command], None),
            "os.posix_spawn": lambda path, words, _: self.starts(path, words, None),
            "os.exec": lambda path, words, _: self.starts(path, words, None),
            "exec": self.listen,  # of a module that is imported
        }

    # -- events ------------------------------------------------------------------------------

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(flags, int) and flags & WRITING:
            self.writes(path)

    def moves(self, _: Any, path: Any, *more: Any) -> None:
        self.writes(path)

    def writes(self, path: Any, *more: Any) -> None:
        whole = whole_path(path)
        if whole and whole not in self.seen and whole != self.notes:
            self.remember(whole)
            self.note(FILE, whole)

    def makes(self, path: Any, *more: Any) -> None:
        whole = whole_path(path)
        if whole and whole not in self.seen:
            self.remember(whole)
            self.note(KNOWN if os.path.lexists(whole) else NEW, whole)

    def remember(self, whole: str) -> None:
        if self.pending:
            self.listen()
        if len(self.seen) >= MOST_SEEN:
            self.seen.clear()
        self.seen.add(whole)

    def starts(self, program: Any, words: Any, directory: Any, *more: Any) -> None:
        """Note where a program that is started runs, and what its command line names."""
        if self.left <= MOST_NOTES // 2:
            return  # the rest is for what this process writes itself
        lines = [os.fsdecode(word) for word in [*words][:MOST_WORDS]]
        separate = [word for line in lines for word in BETWEEN_WORDS.split(line)]
        place = whole_path(directory) if directory else os.getcwd()
        if place and place not in self.seen:
            self.remember(place)
            self.note(KNOWN, place)
        self.named(separate[:MOST_WORDS], place)

    def named(self, arguments: Iterable[str], directory: str) -> None:
        """Note the paths that a program is given: whether it writes there is seen at the end."""
        for word in arguments:
            path = os.path.expanduser(word.partition("=")[2] or word)
            whole = os.path.join(directory, path)
            if "/" in path and "://" not in path and whole not in self.seen:
                self.remember(whole)
                self.note(KNOWN, whole_path(whole))

    # -- what is noted -----------------------------------------------------------------------

    def note(self, kind: str, whole: str) -> None:
        if self.left <= 0:
            return
        directory, name = os.path.split(os.path.normpath(whole))
        place = os.path.realpath(directory)
        path = os.path.join(place, name)
        # tempfile opens files by their directory: some have no name, others are opened once more.
        if encloses_all(path, self.workdir) or (kind == FILE and os.path.isdir(path)):
            return
        if self.is_of_no_interest(path) or self.is_made(path):
            return
        if path.startswith(os.path.join(self.workdir, "")):  # all of it is one place there
            inner = path[len(self.workdir) + 1 :].split("/")
            path = os.path.join(self.workdir, inner[0])
            kind = kind if len(inner) == 1 else KNOWN
            if self.is_made(path):
                return
        elif kind == FILE:
            self.counts[place] = self.counts.get(place, 0) + 1
            if self.counts[place] > MOST_OF_DIRECTORY and not encloses_all(place, self.workdir):
                kind, path = KNOWN, place
                self.made.add(path)
        if kind == NEW or path.startswith(os.path.join(self.workdir, "")):
            self.made.add(path)
        self.left -= 1
        self.write(kind, path)

    def write(self, kind: str, path: str) -> None:
        line = json.dumps([kind, path]) + "\n"
        fd = os.open(self.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(fd).st_size < MOST_BYTES:
                os.write(fd, line.encode("ascii"))
        finally:
            os.close(fd)

    def is_made(self, path: str) -> bool:
        """Tell whether a path is, or is in, a directory that is noted."""
        while path != "/":
            if path in self.made:
                return True
            path = os.path.dirname(path)
        return False

    def is_of_no_interest(self, path: str) -> bool:
        if "/__pycache__" in path or path.endswith(".pyc") or any(is_in(path, s) for s in SYSTEM):
            return True
        if path.startswith(self.ours):  # it comes home from there
            return True
        for place in TEMPORARY:
            if is_in(path, place):
                return bool(NAMELESS.match(path[len(place) + 1 :]))
        of_home = os.path.join(os.path.realpath(self.home), ".")
        inside = [sys.prefix, *places_of_libraries()]
        below_workdir = is_in(path, self.workdir)
        return (path.startswith(of_home) and not below_workdir) or any(
            is_in(path, place) and not is_in(self.workdir, place) for place in inside
        )

    # -- C code ------------------------------------------------------------------------------

    def listen(self, *more: Any) -> None:
        """Listen to what opens files by itself, once it is imported."""
        for name in [name for name in self.pending if name in sys.modules]:
            module: Any = sys.modules[name]
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue
            self.pending.discard(name)
            if name == SPAWN:
                self.accompany(module)
                continue
            for where, place in IN_C_CODE[name]:
                outer, _, inner = where.rpartition(".")
                owner = getattr(module, outer, None) if outer else module
                if owner is not None and hasattr(owner, inner):
                    setattr(owner, inner, self.heard(getattr(owner, inner), place))

    def heard(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def opens(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place and "r" not in args[1:2]:  # as h5py opens what it only reads
                with contextlib.suppress(Exception):  # the program goes on, whatever we note
                    self.writes(args[place])
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # its traceback is as it is without us
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                raise

        return opens

    def accompany(self, spawn: Any) -> None:
        """Begin with each process that multiprocessing spawns: it unpickles what is given to it."""
        prepare, workdir, notes = spawn.get_preparation_data, self.workdir, self.notes
        here = watch.__code__.co_filename

        def get_preparation_data(name: str) -> Any:
            data = prepare(name)
            source = BEGIN.format(file=here, notes=notes, workdir=workdir)
            data["orchestrator"] = Begin(source)
            return data

        spawn.get_preparation_data = get_preparation_data


class Begin:
    """Runs a source where it is unpickled."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __reduce__(self) -> Any:
        return exec, (self.source, {})


def is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(os.path.join(place, ""))


def encloses_all(path: str, *more: str) -> bool:
    """Tell whether all of the user, all temporary files or all in one of `more` is in a path."""
    around = (os.path.expanduser("~"), *more, *TEMPORARY, os.environ.get("TMPDIR", "/tmp"))
    return any(is_in(place, path) for place in map(os.path.realpath, around))


def whole_path(path: Any) -> str:
    """Return an absolute path, not normalised; nothing where it is no path."""
    if not isinstance(path, (str, bytes)) and not hasattr(path, "__fspath__"):
        return ""
    text = os.fsdecode(path)
    if not text or text.startswith((":memory:", "file:")) or "\0" in text:
        return ""
    return text if text.startswith("/") else os.path.join(os.getcwd(), text)


def places_of_libraries() -> list[str]:
    """Return the directories that libraries keep things in, by the variables that name them."""
    named = [value for name, value in os.environ.items() if OF_LIBRARIES.fullmatch(name)]
    return [
        os.path.realpath(value)
        for value in named
        if value.startswith("/") and value.rstrip("/") not in ("", *TEMPORARY)
    ]


def watch(notes: str, workdir: str, arguments: Iterable[str] = (), *, python: bool = True) -> None:
    """Note from now on where this process writes; of what is no Python only what it is told."""
    watching = Watch(notes, workdir)
    with contextlib.suppress(Exception):
        watching.named(arguments, os.getcwd())
    if not python:
        return
    watching.listen()

    def hook(event: str, args: Any, events: Any = watching.events) -> None:
        if event in events:
            with contextlib.suppress(Exception):  # raised, it would keep the program from its file
                events[event](*args)

    sys.addaudithook(hook)
