"""The plan of the house, held: which room may know which, what is light, how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "orchestrator"
FILES = sorted(HOUSE.rglob("*.py"))

# Room -> what of ours it may import, at the top or inside a function: rooms, or modules of rooms.
ARROWS = {
    "errors": set(),
    "interrupt": set(),
    "strict": {"errors"},
    "contradictions": {"config", "errors"},
    "config": {"contradictions", "strict", "errors"},
    "configfile": {"strict", "config", "errors"},
    "experiment": {"errors"},
    "manifest": set(),
    "checkpoints": {"manifest", "experiment", "errors"},
    "slurm": {"errors"},
    "node": {"node"},
    "engine": {
        "engine",
        "checkpoints",
        "config",
        "configfile",
        "strict",
        "experiment",
        "errors",
        "slurm",
    },
    "head": {
        "head",
        "checkpoints",
        "config",
        "configfile",
        "experiment",
        "errors",
        "interrupt",
        "__version__",
    },
    "doors": {"doors", "head", "slurm", "config", "experiment", "errors", "interrupt"},
    "sshd": {"errors"},
    "loopback": {"sshd", "errors"},
    "demo": {"cli", "entry", "loopback", "experiment", "errors", "interrupt", "head.nodes"},
    "cli": {"cli", "head", "doors", "demo", "config", "experiment", "errors", "__version__"},
    "entry": {"cli", "interrupt"},
    "__main__": {"entry"},
    "__init__": {"cluster", "job", "engine", "errors"},  # when somebody asks for it
    "distributed": {"engine"},
    "cluster": {"job", "background", "experiment", "errors"},
    "job": {"background", "head.verdict", "head.logs", "experiment", "errors"},
    "background": {"cli", "doors", "head", "experiment", "interrupt", "errors"},
}
# Room -> what of others'. Standard library only, where it is not here.
OTHERS = {
    "head": {"paramiko", "yaml", "click"},
    "cli": {"click"},
    "demo": {"click"},
    "configfile": {"yaml"},
    "sshd": {"cryptography"},
    "engine": {"torch", "numpy"},
    "doors": {"yaml", "click"},
    "cluster": {"cloudpickle", "typing_extensions"},
    "background": {"click"},
    "node/call.py": {"cloudpickle"},  # which travels with the call
    "node/agent.py": {"torch"},  # it is torchrun
}
LONGEST_FILE = 400
LONGEST_FUNCTION = 50
STORIES = {"engine/train.py": 100}  # read from top to bottom, like a story


def room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
            parts = rest.split(".")
            allowed = parts[0] in ARROWS[here] or ".".join(parts[:2]) in ARROWS[here]
            assert allowed, f"{show(path)}:{line}: {here} may not import {rest}"
        else:
            others = OTHERS.get(here, set()) | OTHERS.get(show(path), set())
            known = head in sys.stdlib_module_names | others
            assert known, f"{show(path)}:{line}: {here} may not import {head}"


def test_a_forbidden_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOUSE", tmp_path)
    (tmp_path / "node").mkdir()
    for text in (
        "def f():\n    from orchestrator import config",
        "import orchestrator.head.plan.plan",
        "def f():\n    import torch",
        "from orchestrator.errors import UsageError",
        "from .. import config",
    ):
        (tmp_path / "node" / "bad.py").write_text(text)
        with pytest.raises(AssertionError):
            test_the_arrows_run_one_way(tmp_path / "node" / "bad.py")


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "node"], ids=show)
def test_what_nodes_run_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


# -- light ------------------------------------------------------------------------------------

WEIGHT = """
import sys
sys.argv = ["master_launch", *sys.argv[2:]]
import orchestrator.cli
try:
    if sys.argv[1:]:
        orchestrator.cli.launch_command.main(sys.argv[1:])
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
    heavy = {"torch", "paramiko", "numpy", "yaml", "cryptography"}
    assert not heavy & set(loaded.split())


def test_the_head_never_loads_torch() -> None:
    """It is not installed there; only the engine and the programs of the user need it."""
    names = [".".join(path.with_suffix("").relative_to(ROOT).parts) for path in FILES]
    own = (".engine", ".distributed", "__main__")
    names = [name for name in names if not any(word in name for word in own)]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *names], check=True)


# -- short ------------------------------------------------------------------------------------


def test_files_are_short() -> None:
    lines = {show(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def test_functions_are_short() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or 0) - node.lineno + 1
                if count > STORIES.get(show(path), LONGEST_FUNCTION):
                    long[f"{show(path)}: {node.name}"] = count
    assert long == {}


# -- clean ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tool", [["mypy"], ["ruff", "check"], ["ruff", "format", "--check"]], ids=" ".join
)
def test_the_tools_have_nothing_to_say(tool: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
