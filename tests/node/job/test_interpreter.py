"""Each private function of CPython that a rank uses does what it is used for, on this version."""

from __future__ import annotations

import subprocess
from pathlib import Path

from orchestrator.node.job.ranks import interpreter
from tests.node.running import PATIENCE, PYTHON

PATH = Path(interpreter.__file__)
LOAD = f"import runpy; i = __import__('types').SimpleNamespace(**runpy.run_path({str(PATH)!r}))\n"


def said(program: str, cwd: Path) -> str:
    words = [PYTHON, "-u", "-c", LOAD + program]
    done = subprocess.run(
        words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
        timeout=PATIENCE,
    )  # fmt: skip
    return done.stdout


def test_threads_end_before_exit_functions(tmp_path: Path) -> None:
    program = """
import atexit, os, threading, time
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
i.end_threads_and_exit_functions()
os._exit(0)
"""
    assert said(program, tmp_path) == "thread\nexit function\n"


def test_an_exit_function_that_raises_stops_nothing(tmp_path: Path) -> None:
    program = """
import atexit, os
atexit.register(print, "registered first")
atexit.register(lambda: 1 / 0)
i.end_threads_and_exit_functions()
print("goes on")
os._exit(0)
"""
    assert said(program, tmp_path) == "registered first\ngoes on\n"


def test_the_parents_finalizers_are_not_called_and_ones_own_are(tmp_path: Path) -> None:
    program = """
import multiprocessing, os, tempfile, weakref
class Thing: pass
theirs, ours = Thing(), Thing()
kept = tempfile.TemporaryDirectory()
multiprocessing.set_start_method("fork")
multiprocessing.current_process().name = "of torchrun"
weakref.finalize(theirs, print, "theirs")
i.forget_the_parent()
weakref.finalize(ours, print, "ours")
multiprocessing.set_start_method("spawn")
i.end_threads_and_exit_functions()
print(multiprocessing.current_process().name)
print(os.path.isdir(kept.name))
os.rmdir(kept.name)
os._exit(0)
"""
    assert said(program, tmp_path) == "ours\nMainProcess\nTrue\n"


def test_a_forked_rank_reads_what_it_was_started_with(tmp_path: Path) -> None:
    program = """
import multiprocessing, os, sys
shows = lambda file: (file.fileno(), file.encoding, file.errors, file.mode, file.closed,
                      file is sys.__stdin__)
def rank():
    i.forget_the_parent()
    print(shows(sys.stdin), repr(sys.stdin.read()), os.path.exists("/proc/self/fd/9"))
print(shows(sys.stdin), repr(""), False)
while os.dup(1) < 8: pass
child = multiprocessing.get_context("fork").Process(target=rank)
child.start()
child.join()
"""
    by_hand, forked = said(program, tmp_path).splitlines()
    assert forked == by_hand


def test_objects_are_finalized_while_names_mean_something(tmp_path: Path) -> None:
    """The end of `python program` is the measure: alone, in a cycle, held by a signal's handler."""
    program = """
import signal
class Thing:
    def __init__(self, name): self.name = name
    def __del__(self): print(self.name, helper())
def helper(): return "helps"
alone, cycle, held = Thing("alone"), Thing("cycle"), Thing("held")
cycle.me = cycle
signal.signal(signal.SIGUSR1, lambda *a: held)
"""
    (tmp_path / "program.py").write_text(program)
    words = [PYTHON, "-u", "program.py"]
    by_hand = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    ends = f"""
import os, sys, types
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec({program!r}, vars(main))
del main
i.finalize_objects()
os._exit(0)
"""
    assert sorted(said(ends, tmp_path).splitlines()) == sorted(by_hand.stdout.splitlines())
    assert "cycle helps" in by_hand.stdout


def test_objects_are_finalized_and_files_written(tmp_path: Path) -> None:
    program = """
import os
class Thing:
    def __del__(self, print=print): print("deleted")
thing = Thing()
file = open("file", "w")
file.write("written")
i.finalize_objects()
import os
os._exit(0)
"""
    assert said(program, tmp_path) == "deleted\n"
    assert (tmp_path / "file").read_text() == "written"


def test_a_destructor_may_wait_for_a_thread_of_c_code(tmp_path: Path) -> None:
    """It holds the interpreter meanwhile, which the thread needs: as gloo's groups at the end."""
    program = """
import _thread, ctypes, hashlib, os
libc, semaphore, data = ctypes.PyDLL(None), ctypes.create_string_buffer(64), b"x" * 30_000_000
libc.sem_init(semaphore, 0, 0)
class Group:
    def __del__(self, libc=libc, semaphore=semaphore):
        libc.sem_wait(semaphore)
def works(libc=libc, semaphore=semaphore, data=data):
    hashlib.sha256(data).digest()  # without the interpreter
    libc.sem_post(semaphore)
_thread.start_new_thread(works, ())
group = Group()
def end(finalize=i.finalize_objects, os=os):
    finalize()
    os.write(1, b"over")
    os._exit(0)
end()
"""
    assert said(program, tmp_path) == "over"


def test_a_module_runs_as_under_m_and_stays_main(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv)")
    program = """
import os, sys
sys.argv = ["own", "a b"]
sys.path.insert(0, os.getcwd())
i.run_module("own", alter_argv=True)
import __main__
print(__main__.__file__.endswith("own.py"))
"""
    name = tmp_path / "own.py"
    assert said(program, tmp_path) == f"__main__ own [{str(name)!r}, 'a b']\nTrue\n"


def test_text_is_written_at_once_as_under_u(tmp_path: Path) -> None:
    """However Python was started: what `-u` makes of the streams, this makes of them."""
    show = """
for name in ("stdout", "stderr"):
    file = getattr(sys, name)
    facts = [getattr(file, key) for key in ("mode", "encoding", "errors", "newlines", "closed")]
    print(repr(file), repr(file.buffer), file.line_buffering, file.write_through, *facts,
          file is getattr(sys, "__" + name + "__"), file.fileno())
sys.stdout.write("a part")
os._exit(0)
"""
    program = "import os, sys\ni.unbuffer()\n"
    wanted = said("import os, sys\n" + show, tmp_path)
    assert wanted.endswith("a part")
    assert said(program + show, tmp_path) == wanted
    words = [PYTHON, "-c", LOAD + program + show]
    assert subprocess.check_output(words, text=True) == wanted
