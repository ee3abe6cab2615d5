"""Programs from a grammar of starts, prints, forks, signals and ends, for whoever runs one twice.

What such a program prints and how it ends depends on nothing but its rank: two ways of running it
can be compared byte by byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypothesis import strategies as st

BEGIN = """\
import atexit, multiprocessing, os, signal, subprocess, sys, threading, time, warnings
if os.environ.get("CONTROL"):  # where another launcher mixes the output of all ranks
    path, flags = os.environ["CONTROL"] + os.environ["RANK"], os.O_WRONLY | os.O_CREAT | os.O_APPEND
    out = os.open(path, flags)
    os.dup2(out, 1)
    os.dup2(out, 2)
rank = os.environ["RANK"]
class Thing:
    def __del__(self, print=print): print("deleted")
def child(*words):
    print(*words)
"""

PRINTS = [
    'print("a line of", rank, 5, None)',
    'print("no newline", end="")',
    'print(".", end="", flush=True)',
    'print("to stderr", rank, file=sys.stderr)',
    'sys.stdout.write("written, ")',
    'sys.stderr.write("and its like; ")',
    'sys.stdout.buffer.write(bytes(range(256)))',
    'os.write(1, b"raw\\r\\n")',
    'os.write(2, b"50%\\r")',
    'print("é漢😀", "\\x1b[31mred\\x1b[0m", "\\0", sep="|")',
    'print("x" * 70_000)',
    'print()',
    'warnings.warn("once")',
    'print(sys.argv, os.getcwd(), os.environ["PWD"], os.environ["WORLD_SIZE"])',
    'print(os.environ["LOCAL_RANK"], "RANK" in os.environ, __name__, __file__)',
    'print(repr(sys.stdin.read()))',
    'print(sys.orig_argv[1:], sys.stdout.write_through, sys.stdout.line_buffering)',
    'print(os.getpid() == os.getsid(0) == os.getpgrp(), threading.active_count())',
    'print(multiprocessing.current_process().name, multiprocessing.get_start_method(True))',
]  # fmt: skip


def alone(fork: str) -> str:
    """Let what outlives the program die of SIGTERM without a word: whoever sends it."""
    return (
        f"before = signal.signal(signal.SIGTERM, signal.SIG_DFL)\n{fork}\n"
        "signal.signal(signal.SIGTERM, before)"
    )


FORKS = [
    'if os.fork() == 0: child("forked"); os._exit(3)\n'
    'print(os.waitstatus_to_exitcode(os.wait()[1]))',
    'if os.fork() == 0: os.kill(os.getpid(), 9)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))',
    alone('if os.fork() == 0: os.setsid(); time.sleep(600); os._exit(0)'),
    'p = multiprocessing.get_context("fork").Process(target=child, args=("process", rank))\n'
    'p.start(); p.join(); print(p.exitcode)',
    alone(
        'multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)'
        '.start()'
    ),
    'subprocess.run(["sh", "-c", "echo from sh; echo its error >&2; exit 4"])',
    'print(subprocess.run(["sh", "-c", "kill -9 $$"]).returncode)',
    'subprocess.Popen(["sleep", "600"], start_new_session=True)',
    't = threading.Thread(target=child, args=("thread",)); t.start(); t.join()',
    # One write: two such threads may end at the same time
    'threading.Thread(target=lambda: (threading.main_thread().join(), os.write(1, b"last\\n")))'
    '.start()',
    'if "AGAIN" not in os.environ:\n'
    '    os.environ["AGAIN"] = "1"; os.execv(sys.executable, sys.orig_argv)',
]  # fmt: skip
SIGNALS = [
    'signal.signal(signal.SIGUSR1, lambda number, _: print("signal", number))\n'
    'os.kill(os.getpid(), signal.SIGUSR1)',
    'signal.signal(signal.SIGTERM, lambda number, _: print("asked"))\n'
    'os.killpg(os.getpgrp(), signal.SIGTERM)',
    'signal.signal(signal.SIGHUP, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGHUP)',
    'try: os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n'
    'except KeyboardInterrupt: print("interrupted")',
    'print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGPIPE))',
    'print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))',
]  # fmt: skip
LATER = [
    'atexit.register(print, "exit function of", rank)',
    'thing = Thing()',
    'kept = open("kept." + rank, "w"); kept.write("never closed")',
    'sys.excepthook = lambda kind, *_: print("hooked", kind.__name__)',
]  # fmt: skip
GOOD = ["", "sys.exit()", "sys.exit(0)", "os._exit(0)", "raise SystemExit(False)"]
BAD = [
    "sys.exit(3)",
    "sys.exit('words')",
    "os._exit(7)",
    "raise ValueError('two\\nlines')",
    "raise KeyboardInterrupt",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)",
    "os.abort()",
    "exec('1 +')",
]


def comparable(output: bytes, text: str) -> bytes:
    """Leave out what differs from one run of the very same program to the next, or is our own."""
    output = re.sub(rb" at 0x[0-9a-f]+", b"", output)
    if "os.abort()" in text:  # ours shows the Python stack too
        output = output.partition(b"Fatal Python error")[0]
    if "excepthook" in text:  # what it holds on to is deleted or not, as it happens
        output = output.replace(b"deleted\n", b"")
    return output


@dataclass(frozen=True)
class Program:
    """A program in source, and whether it ends well."""

    text: str
    good: bool


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program; the last of its steps is its end."""
    kinds = st.sampled_from([PRINTS, PRINTS, FORKS, SIGNALS, LATER])
    steps = draw(st.lists(kinds.flatmap(st.sampled_from), max_size=7))
    good = draw(st.booleans())
    end = draw(st.sampled_from(GOOD if good else BAD))
    return Program("\n".join([BEGIN, *steps, end, ""]), good)
