"""A process sets its title in /proc; memory beside the two areas is untouched."""

import os
import subprocess
from pathlib import Path

from orchestrator.node.job.ranks import interpreter
from tests.node.running import PYTHON

PATH = Path(interpreter.__file__)
PROGRAM = f"""
import ctypes, os, runpy, sys
own = __import__("types").SimpleNamespace(**runpy.run_path({str(PATH)!r}))
def shown(what):
    return open("/proc/self/" + what, "rb").read().rstrip(b"\\0").split(b"\\0")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
"""


def said(program: str, **variables: str) -> list[str]:
    words = [PYTHON, "-c", PROGRAM + program, "a first argument", "x" * 50]
    env = {"PATH": os.environ["PATH"], **variables}
    run = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


def test_show_command_replaces_command_line_alone() -> None:
    program = """
before = shown("environ")
print(own.show_command(["python", "train.py", "", "é"]), shown("cmdline"))
print(own.show_command(["python", "y" * 100_000]), len(shown("cmdline")[1]) > 50)
print(shown("environ") == before, getenv(b"KEPT"), len(sys.argv[2]))
"""
    assert said(program, KEPT="here", PYTHONUTF8="1") == [
        "True [b'python', b'train.py', b'', b'\\xc3\\xa9']",
        "False True",
        "True b'here' 50",
    ]


def test_show_environment_keeps_values_for_c_code() -> None:
    program = """
before, command = dict(os.environ), shown("cmdline")
os.environ["LATER"] = "é"
print(own.show_environment({"A": "1", "B": "2"}), shown("environ"))
print([getenv(name) for name in (b"PATH", b"KEPT", b"LATER", b"A")][1:])
print({**before, "LATER": "é"} == dict(os.environ), shown("cmdline") == command)
print(own.show_environment({"A": "1", "B": "y" * 100_000}), shown("environ"))
print(os.popen("echo $KEPT").read())
"""
    assert said(program, KEPT="here", PYTHONUTF8="1")[:5] == [
        "True [b'A=1', b'B=2']",
        "[b'here', b'\\xc3\\xa9', None]",
        "True True",
        "False [b'A=1']",
        "here",
    ]
