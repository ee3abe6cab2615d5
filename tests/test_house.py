"""The plan of the house, held: which room may know which, what is light, how long things are."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "orchestrator"
FILES = sorted(HOUSE.rglob("*.py"))

# Room -> the rooms and files of ours that it may import, at the top or inside a function. A room is
# a folder; those of head/, node/ and launchers/ are listed one by one. The order is that of the
# floors: no room imports one that stands further down in this list.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "interrupt": set(),
    "permissions": set(),
    "files": set(),
    "folder": {"files"},
    "host_ranges": set(),
    "own_names": set(),
    "program": set(),
    "text": {"errors"},
    "version": set(),
    "config": {"errors", "files"},
    "protocol": {"version"},
    "records": {"config", "errors", "files", "permissions", "protocol", "text"},
    "traces": {"errors", "files"},
    "slurm_environment": {"errors", "host_ranges"},
    "trackers": {"errors"},
    "node/peers": {"protocol"},
    "node/job": {"files", "node/peers", "protocol"},
    "node/facts": {"node/job", "program", "protocol"},
    "node/metrics": {"node/facts", "node/job", "protocol", "text"},
    "node/calls": {"node/job", "protocol"},
    "node/forward": {"files", "folder", "node/peers", "protocol"},
    "node/saved": {"files", "folder", "node/forward", "node/job", "protocol"},
    "node/code": {
        *("files", "node/facts", "node/forward", "node/job", "permissions", "protocol"),
    },
    "node/warm": {"node/job", "protocol"},
    "node/environments": {"files", "permissions", "node/code", "node/job", "protocol"},
    "node/server": {
        "node/environments",
        *("protocol", "node/calls", "node/code", "node/facts", "node/job", "node/peers"),
        *("files", "folder", "node/forward", "node/saved", "node/warm", "permissions"),
    },
    "node": {"permissions", "node/job", "node/metrics", "node/server", "node/warm"},
    "engine/ranks": {"config", "errors", "slurm_environment"},
    "engine/sharding": {"config", "errors", "engine/ranks"},
    "engine/models": {"config", "errors", "engine/ranks", "engine/sharding"},
    "engine/data": {"config", "errors", "files", "engine/models", "engine/ranks"},
    "engine/saving": {
        *("config", "errors", "files", "permissions", "records", "text", "engine/ranks"),
        "engine/sharding",
    },
    "engine/observe": {
        *("config", "errors", "files", "protocol", "records", "trackers", "traces"),
        *("engine/ranks", "engine/sharding"),
    },
    "engine/core": {
        *("config", "errors", "text", "engine/data", "engine/models", "engine/observe"),
        *("engine/ranks", "engine/saving", "engine/sharding"),
    },
    "engine/verify": {
        *("config", "errors", "files", "text"),
        *("engine/models", "engine/observe", "engine/ranks", "engine/sharding"),
    },
    "engine": {
        *("config", "errors", "files", "records", "trackers", "engine/core", "engine/data"),
        *("engine/models", "engine/observe", "engine/ranks", "engine/saving", "traces"),
        "engine/sharding",
    },
    "distributed": {"engine/ranks", "engine/saving"},
    "head": set(),
    "head/inventory": {"errors", "host_ranges", "protocol", "text"},
    "head/screen": {"text"},
    "head/connect": {"errors", "interrupt", "protocol", "text", "head/inventory"},
    "head/held": {
        *("errors", "files", "interrupt", "protocol", "version"),
        *("head/connect", "head/inventory"),
    },
    "head/code": {
        *("errors", "files", "interrupt", "protocol", "text"),
        *("head/connect", "head/inventory"),
    },
    "head/plan": {"config", "errors", "protocol", "text", "head/inventory"},
    "head/verify": {"config", "text", "head/screen"},
    "head/doctor": {
        *("errors", "protocol", "text"),
        *("head/inventory", "head/plan", "head/screen"),
    },
    "head/outputs": {
        *("folder", "errors", "files", "protocol", "records", "text", "head/connect"),
    },
    "head/follow": {
        *("errors", "files", "interrupt", "protocol", "records", "text"),
        *("head/connect", "head/inventory", "head/outputs", "head/screen"),
    },
    "head/notify": {
        *("errors", "files", "records", "text", "version"),
        *("head/follow", "head/screen"),
    },
    "head/chores": {
        *("folder", "errors", "files", "protocol", "records", "text"),
        *("head/code", "head/connect", "head/inventory", "head/outputs", "head/screen"),
    },
    "head/resume": {
        *("config", "folder", "errors", "files", "protocol", "records", "text"),
        *("head/chores", "head/code", "head/connect", "head/inventory", "head/outputs"),
        "head/screen",
    },
    "head/saved": {
        *("errors", "protocol", "text"),
        *(
            "head/code",
            "head/connect",
            "head/inventory",
            "head/outputs",
            "head/resume",
            "head/screen",
        ),
    },
    "head/slurm": {
        *("errors", "records", "slurm_environment"),
        *("head/connect", "head/follow", "head/inventory", "head/screen"),
    },
    "head/recover": {"errors", "records", "text"},
    "head/launch": {
        *("config", "errors", "interrupt", "program", "protocol", "records", "text", "version"),
        *("head/code", "head/connect", "head/doctor", "head/follow", "head/held"),
        *("head/inventory", "head/notify", "head/plan", "head/resume", "head/screen"),
        "head/slurm",
    },
    "head/restart": {
        *("config", "errors", "interrupt", "protocol", "records", "text"),
        *("head/connect", "head/doctor", "head/follow", "head/inventory", "head/recover"),
        *("head/resume", "head/saved", "head/screen"),
    },
    "head/environments": {
        *("config", "errors", "files", "protocol", "text"),
        *("head/code", "head/connect", "head/inventory", "head/launch", "head/screen"),
    },
    "head/status": {
        *("config", "errors", "protocol", "records", "text"),
        *("head/connect", "head/follow", "head/held", "head/inventory", "head/recover"),
        *("head/screen", "head/slurm"),
    },
    "head/calls": {"errors", "protocol", "records", "head/connect"},
    "head/prune": {
        *("errors", "files", "protocol", "records", "text"),
        *("head/connect", "head/screen", "head/status"),
    },
    "head/top": {
        *("config", "errors", "protocol", "records", "text"),
        *("head/connect", "head/inventory", "head/screen"),
    },
    "head/profile": {
        *("errors", "files", "folder", "protocol", "records", "text", "traces"),
        *("head/connect", "head/follow", "head/outputs", "head/screen"),
    },
    "head/report": {"config", "errors", "files", "records", "text", "head/follow", "head/screen"},
    "head/track": {"errors", "own_names", "records", "trackers", "files"},
    "head/dashboard": {
        *("errors", "files", "own_names", "records"),
        *("head/follow", "head/report", "head/screen", "head/top"),
    },
    "head/commands": {
        *("trackers", "head/track"),
        *("folder", "config", "errors", "files", "interrupt", "protocol", "records", "text"),
        *("head/connect", "head/doctor", "head/follow", "head/inventory", "head/launch"),
        *("head/plan", "head/prune", "head/screen", "head/slurm", "head/status", "head/verify"),
        *(
            "head/chores",
            "head/held",
            "head/dashboard",
            "head/notify",
            "head/profile",
            "head/report",
            "head/restart",
            "head/top",
        ),
        "head/code",
    },
    "launchers": {"errors", "head/inventory", "head/plan", "head/screen", "head/slurm"},
    "launchers/slurm": {
        *("config", "errors", "records"),
        *("head/commands", "head/launch", "head/plan", "head/screen", "head/slurm", "head/status"),
    },
    "launchers/by_hand": {
        *("config", "errors", "interrupt", "protocol", "records"),
        *("head/commands", "head/connect", "head/inventory", "head/launch", "head/plan"),
        *("head/screen", "head/slurm"),
    },
    "launchers/containers": {
        *("config", "errors", "text"),
        *("head/launch", "head/plan", "head/screen"),
    },
    "local_cluster": {
        *("config", "errors", "interrupt", "records", "text"),
        *("head/inventory", "head/screen"),
    },
    "cli": {
        *("config", "errors", "files", "interrupt", "text", "trackers", "version"),
        *("head/chores", "head/commands", "head/environments", "head/screen", "local_cluster"),
        *("launchers", "launchers/by_hand", "launchers/containers", "launchers/slurm"),
    },
    "api": {
        *("cli", "config", "errors", "protocol", "records", "node/calls"),
        *("head/calls", "head/commands", "head/follow", "head/inventory", "head/launch"),
        *("head/chores", "head/connect", "head/screen", "head/status"),
    },
    "entry": {"cli", "interrupt"},
    "__main__": {"entry"},
    "__init__": {
        "api",
        "engine",
        "engine/saving",
        "errors",
        "version",
    },  # when somebody asks for it
}
ROOMS_INSIDE = ("head", "node", "engine", "launchers")  # their folders are rooms of their own
ENGINE = ("ranks", "sharding", "models", "data", "saving", "observe", "core", "verify")
# Room -> what it may import of others' packages. Where it is not listed: the standard library only.
OTHERS = {
    "head/connect": {"paramiko"},
    "head/commands": {"click"},
    "head/dashboard": {"starlette", "uvicorn"},
    "head/top": {"rich", "textual"},
    "head/launch": {"click"},
    "head/follow": {"click"},
    "head/screen": {"rich"},
    "head/status": {"click"},
    "head/plan": {"yaml"},
    "head/slurm": {"click"},
    "cli": {"click"},
    "config": {"yaml"},
    "local_cluster/sshd.py": {"cryptography"},
    **{f"engine/{inside}": {"torch", "numpy"} for inside in ENGINE},
    "engine": {"torch"},
    "launchers": {"yaml", "click"},
    "launchers/slurm": {"click"},
    "launchers/by_hand": {"click"},
    "launchers/containers": {"yaml", "click"},
    "api": {"click"},
    "api/cluster.py": {"cloudpickle", "fabric", "typing_extensions"},
    "head/chores/fabric_group.py": {"fabric"},
    "api/own_modules.py": {"cloudpickle"},
    "api/pool.py": {"cloudpickle"},
    "protocol/message.py": {"typing_extensions"},  # for the type checker alone
    "node/job/run_function.py": {"cloudpickle"},  # which travels with the function
    "node/calls/serve.py": {"cloudpickle"},
    "node/job/fast_torchrun.py": {"torch"},  # it is torchrun
}
MOST_MODULES = 16
LONGEST_FUNCTION = 50


def room(path: Path) -> str:
    """The folder that a file is in, as ARROWS names it; a file at the top is a room of its own."""
    parts = path.relative_to(HOUSE).parts
    if parts[0] in ROOMS_INSIDE and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


def room_of_import(name: str) -> str:
    """The room of `orchestrator.` + name, where name may end with something inside a module."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = HOUSE.joinpath(*parts[:count])
        if path.with_suffix(".py").exists():
            return room(path.with_suffix(".py"))
        if path.is_dir():
            return room(path / "__init__.py")
    return "__init__"


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def show(path: Path) -> str:
    return str(path.relative_to(HOUSE))


@pytest.mark.parametrize("path", FILES, ids=show)
def test_the_arrows_run_one_way(path: Path) -> None:
    here = room(path)
    assert here in ARROWS, f"{here} has no place in the plan"
    for line, name in imports(path):
        head, _, rest = name.partition(".")
        if head == "orchestrator":
            there = room_of_import(rest)
            allowed = there == here or there in ARROWS[here]
            assert allowed, f"{show(path)}:{line}: {here} may not import {rest} ({there})"
        else:
            others = OTHERS.get(here, set()) | OTHERS.get(show(path), set())
            known = head in sys.stdlib_module_names | others
            assert known, f"{show(path)}:{line}: {here} may not import {head}"


def test_no_room_imports_one_further_down_the_list() -> None:
    floors = list(ARROWS)
    for here, allowed in ARROWS.items():
        for there in allowed:
            assert floors.index(there) < floors.index(here), f"{here} -> {there} runs upwards"


def test_no_arrow_is_permitted_that_nothing_needs() -> None:
    used: dict[str, set[str]] = {}
    for path in FILES:
        for _, name in imports(path):
            if name.startswith("orchestrator."):
                used.setdefault(room(path), set()).add(room_of_import(name.partition(".")[2]))
    idle = {here: allowed - used.get(here, set()) for here, allowed in ARROWS.items()}
    assert {here: rooms for here, rooms in idle.items() if rooms} == {}


def test_rooms_are_small_enough_to_be_seen_at_once() -> None:
    folders: dict[str, int] = {}
    for path in FILES:
        if path.name != "__init__.py":
            folders[show(path.parent)] = folders.get(show(path.parent), 0) + 1
    assert {name: count for name, count in folders.items() if count > MOST_MODULES} == {}


def test_a_forbidden_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOUSE", tmp_path)
    (tmp_path / "node/job").mkdir(parents=True)
    for text in (
        "def f():\n    from orchestrator.config import schema",
        "import orchestrator.head.plan.plan",
        "def f():\n    import torch",
        "from orchestrator.errors import UsageError",
        "from .. import config",
    ):
        (tmp_path / "node/job/bad.py").write_text(text)
        with pytest.raises(AssertionError):
            test_the_arrows_run_one_way(tmp_path / "node/job/bad.py")


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p).startswith(("node", "protocol"))], ids=show
)
def test_what_nodes_run_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


# -- light ------------------------------------------------------------------------------------

WEIGHT = """
import sys
sys.argv = ["master_launch", *sys.argv[2:]]
import orchestrator.cli.main
try:
    if sys.argv[1:]:
        orchestrator.cli.main.launch_command.main(sys.argv[1:])
except SystemExit as leaving:
    assert not leaving.code, leaving.code
print("loaded", *sys.modules)
"""


@pytest.mark.parametrize("words", [[], ["--help"]], ids=["import", "master_launch --help"])
def test_the_front_door_is_light(words: list[str]) -> None:
    command = [sys.executable, "-c", WEIGHT, "", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    help_text, _, loaded = done.stdout.rpartition("loaded ")
    assert ("SCRIPT [ARGS...]" in help_text) == bool(words)
    heavy = {"torch", "paramiko", "numpy", "yaml", "cryptography", "rich"}
    assert not heavy & set(loaded.split())


def test_logins_do_without_the_parts_of_paramiko_that_nobody_uses() -> None:
    """They are most of the time that it takes to load."""
    code = "import sys, orchestrator.head.connect.ssh; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "paramiko.transport" in loaded
    assert not loaded & {"asyncio", "unittest.mock", "invoke.tasks"}


def test_the_head_never_loads_torch() -> None:
    """It is not installed there; only the engine and the programs of the user need it."""
    names = [".".join(path.with_suffix("").relative_to(ROOT).parts) for path in FILES]
    own = (".engine", ".distributed", "__main__")
    names = [name for name in names if not any(word in name for word in own)]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *names], check=True)


# -- one way to the terminal -------------------------------------------------------------------

# Who may write there: these clean what they write, or write nothing but words of our own.
MOUTHS = {"head/screen/output.py", "head/screen/screen.py", "interrupt.py"}


def writes_to_the_terminal(path: Path) -> Iterator[int]:
    """The lines of a file that write to the terminal by themselves."""
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            direct = called in ("print", "click.echo", "click.secho", "input", "click.confirm")
            stream = called.startswith(("sys.stdout.write", "sys.stderr.write", "sys.__std"))
            if direct or stream or (called == "os.write" and first in ("1", "2")):
                yield node.lineno


def test_one_module_writes_to_the_terminal() -> None:
    """What a node, a file or a stranger says is cleaned there, so that no escape gets through."""
    shown = {
        f"{show(path)}:{line}"
        for path in FILES
        if room(path).split("/")[0] not in ("engine", "node") and show(path) not in MOUTHS
        for line in writes_to_the_terminal(path)
    }
    assert shown == set()


def test_whoever_writes_to_the_terminal_is_seen(tmp_path: Path) -> None:
    for text in ("print(1)", "import sys\nsys.stderr.write('')", "import os\nos.write(2, b'')"):
        (tmp_path / "bad.py").write_text(text)
        assert list(writes_to_the_terminal(tmp_path / "bad.py"))


# -- short ------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or 0) - node.lineno + 1
                count -= len((ast.get_docstring(node) or "").splitlines())
                if count > LONGEST_FUNCTION:
                    long[f"{show(path)}: {node.name}"] = count
    assert long == {}
