"""What a rank notes of where it writes, in a Python of its own as a rank is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.node.job.ranks import written_paths

BEGIN = """
import os, sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
out = {out!r}
if __name__ == "__main__":  # and not in a process that is spawned
    watch = ModuleType("watch")
    SourceFileLoader("watch", {file!r}).exec_module(watch)
    watch.TEMPORARY = ({tmp!r},)
    os.chdir({work!r})
    watch.watch({notes!r}, {work!r})
"""
Noted = Callable[[str], set[tuple[str, str]]]


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    """Runs a program, and returns what it notes, by short paths."""
    for name in ("out", "work", "tmp", "home/runs/job/0", "login"):
        (tmp_path / name).mkdir(parents=True)
    notes = tmp_path / "home/runs/job/0/written_0"

    def run(program: str) -> set[tuple[str, str]]:
        names = {name: str(tmp_path / name) for name in ("out", "work", "tmp")}
        begin = BEGIN.format(file=written_paths.__file__, notes=str(notes), **names)
        file = tmp_path / "program.py"
        file.write_text(begin + program)
        env = {"HOME": str(tmp_path / "login"), "PATH": os.defpath, "HF_HOME": str(tmp_path / "hf")}
        subprocess.run([sys.executable, "-B", str(file)], check=True, env=env)
        if not notes.exists():
            return set()
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        return {(kind, shortened(path)) for kind, path in lines}

    def shortened(path: str) -> str:
        place, _, rest = path.removeprefix(f"{tmp_path}/").partition("/")
        return "/".join([place.upper(), *([rest] if rest else [])])

    return run


@pytest.mark.parametrize(
    ("program", "notes"),
    [
        ("open(out + '/x', 'w'); open(out + '/x', 'a'); open(out + '/x')", {("file", "OUT/x")}),
        (
            "os.makedirs(out + '/a/b'); open(out + '/a/b/x', 'w'); os.makedirs(out, exist_ok=True)",
            {("new", "OUT/a"), ("known", "OUT")},
        ),
        ("os.chdir(out); open('x', 'w'); os.mkdir('d')", {("file", "OUT/x"), ("new", "OUT/d")}),
        ("os.close(os.open(out + '/x', os.O_CREAT | os.O_RDWR))", {("file", "OUT/x")}),
        (
            "open(out + '/x', 'wb'); os.replace(out + '/x', out.encode() + b'/y')",
            {("file", "OUT/x"), ("file", "OUT/y")},
        ),
        ("from pathlib import Path\nPath(out, 'x').write_text('')", {("file", "OUT/x")}),
        (
            "os.symlink(out, 'here'); open('here/x', 'w')",
            {("file", "WORK/here"), ("file", "OUT/x")},
        ),
        ("import sqlite3; sqlite3.connect(out + '/x'); sqlite3.connect(':memory:')",
         {("file", "OUT/x")}),
        (
            "if not os.fork():\n    open(out + '/x', 'w'); os._exit(0)\nos.wait()",
            {("file", "OUT/x")},
        ),
        # What a program is given, whoever opens it: looked at when the job is over.
        (
            "words = ['--to', out + '/a', '--x=~/b', out, 'https://x/y', 'word', '../home/x']\n"
            "watch.watch(out + '/../home/runs/job/0/written_0', '.', words, python=False)",
            {("known", "OUT/a"), ("known", "LOGIN/b"), ("known", "OUT")},
        ),
        # In the program's own directory all of an outermost name is one place.
        ("os.makedirs('a/b'); open('a/b/x', 'w'); open('y', 'w')",
         {("new", "WORK/a"), ("file", "WORK/y")}),
        # Of no interest: what comes home, caches, devices, and what tempfile names and nobody else.
        ("open(os.devnull, 'w'); import tempfile; tempfile.TemporaryFile(dir=out)", set()),
        ("open('../home/x', 'w'); os.mkdir('../hf'); open('../hf/x', 'w')", set()),
        ("os.mkdir('../login/.cache'); open('../login/.netrc', 'w')", set()),
        ("import tempfile; tempfile.tempdir = '../tmp'; tempfile.mkdtemp(dir='../tmp')", set()),
        ("open('../tmp/x', 'w')", {("file", "TMP/x")}),
        # What C code opens, in modules that are called as those are.
        (
            "import types\nmodule = types.ModuleType('safetensors')\n"
            "module.serialize_file = lambda data, name: None\nsys.modules['safetensors'] = module\n"
            "import colorsys  # whatever is imported next\n"
            "module.serialize_file(b'', out + '/y')\n"
            "module = types.ModuleType('h5py._hl.files')\n"
            "module.make_fid = lambda name, mode: 1 / 0 if 'wrong' in str(name) else None\n"
            "sys.modules[module.__name__] = module\nimport this\n"
            "module.make_fid((out + '/x').encode(), 'w'); module.make_fid(out + '/read', 'r')\n"
            "try:\n    module.make_fid(out + '/wrong', 'w')\n"
            "except ZeroDivisionError as error:\n"
            "    frames = error.__traceback__.tb_next.tb_frame.f_code.co_filename\n"
            "    # Python 3.10 raises again with the traceback that it had.\n"
            "    assert frames == __file__ or sys.version_info < (3, 11), frames\n",
            {("file", "OUT/x"), ("file", "OUT/y"), ("file", "OUT/wrong")},
        ),
        (
            "import types\nmodule = types.ModuleType('torch._C')\n"
            "class Writer:\n    def __init__(self, file, *more): pass\n"
            "class Script:\n    def save(self, file): pass\n"
            "module.PyTorchFileWriter, module.ScriptModule = Writer, Script\n"
            "sys.modules[module.__name__] = module\nimport this\n"
            "import io; Writer(out + '/saved', True); Writer(io.BytesIO())\n"
            "Script().save(out + '/scripted')\n",
            {("file", "OUT/saved"), ("file", "OUT/scripted")},
        ),
        # Programs that it starts: where they run, and what their command lines name.
        (
            "from subprocess import run\nrun(['true', '--to=' + out + '/a', 'a/b'], cwd='../out')\n"
            "os.system(f'true >{out}/c; true \"{out}/d\" https://x/y 2>/dev/null')",
            {("known", f"OUT{path}") for path in ("", "/a", "/a/b", "/c", "/d")},
        ),
        (
            "from subprocess import run\nos.mkdir(out + '/lr=1'); run(['true'])\n"
            "os.chdir(out); run(['true']); run(['true'], cwd='lr=1')\n",
            {("new", "OUT/lr=1"), ("known", "OUT")},
        ),
        # Few of many files, then the directory; and an end of it.
        (
            "for i in range(1000): open(f'{out}/{i}', 'w')",
            {*(("file", f"OUT/{i}") for i in range(20)), ("known", "OUT")},
        ),
    ],
)  # fmt: skip
def test_what_a_rank_notes(noted: Noted, program: str, notes: set[tuple[str, str]]) -> None:
    assert noted(program) == notes


SPAWNS = """
import multiprocessing
def work(): open(out + "/x", "w")
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


def test_a_process_that_is_spawned_notes_too(noted: Noted) -> None:
    assert noted(SPAWNS) == {("file", "OUT/x")}
