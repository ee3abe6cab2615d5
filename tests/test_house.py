"""The plan of the house, held: which room may know which, what is light, how long things are."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "orchestrator"
FILES = sorted(HOUSE.rglob("*.py"))

TOP = {
    *("orchestrator", "config", "scripts", "experiments", "tests", "docs", ".ci"),
    *("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
    *(
        "Makefile",
        ".github",
        "node_ip_list.txt",
        "pyproject.toml",
        "setup.py",
        "mkdocs.yml",
        ".gitignore",
        ".pre-commit-config.yaml",
    ),
}

# The rooms from the ground up: a room imports those before it only, at the top or inside a
# function. A room is a folder; those of the folders in ROOMS_INSIDE are listed one by one.
CORE = [
    *("common", "protocol", "config", "records", "traces", "trackers"),
    *("node/peers", "node/job", "node/server", "node/machine"),
    *("node/transfer", "node/warm", "node/environments"),
    *("node/start", "node/follow", "node"),
    *("head", "head/nodes", "head/screen", "head/background", "head/connect"),
    *("head/events", "head/transfer", "head/plan", "head/doctor", "head/follow", "head/exec"),
    *("head/schedulers", "head/start", "head/environments", "head/status", "head/prune"),
    *(
        "head/commands",
        "head/init",
        "launchers",
        "local_cluster",
        "cli",
        "api",
        "entry",
        "__main__",
    ),
]
# Each wing imports the core, and no other wing; the core finds views by name (common/wings.py).
WINGS = {
    "engine": [
        *("engine/ranks", "engine/sharding", "engine/models", "engine/data", "engine/saving"),
        *("engine/observe", "engine/core", "engine/verify", "engine", "distributed"),
    ],
    "views": [
        *("views", "views/verify", "views/profile", "views/report", "views/top", "views/track"),
        "views/dashboard",
    ],
}
FLOORS = [*CORE, *WINGS["engine"], *WINGS["views"], "__init__"]
ROOMS_INSIDE = ("head", "node", "engine", "views")
ENGINE = ("ranks", "sharding", "models", "data", "saving", "observe", "core", "verify")
# Room -> what it may import of others' packages; else the standard library only.
OTHERS = {
    "head/connect": {"fabric", "paramiko"},
    "head/commands": {"click"},
    "views/dashboard": {"starlette"},
    "views/track/exposition.py": {"starlette"},
    "views/serve.py": {"starlette", "uvicorn"},
    "views/report/page.py": {"jinja2"},
    "views/top": {"rich", "textual"},
    "head/start": {"click"},
    "head/follow": {"click"},
    "head/screen": {"rich"},
    "head/status": {"click"},
    "head/plan": {"yaml"},
    "head/schedulers": {"click"},
    "cli": {"click"},
    "config": {"yaml"},
    **{f"engine/{inside}": {"torch", "numpy"} for inside in ENGINE},
    "engine": {"torch"},
    "launchers": {"click"},
    "api": {"click"},
    "api/cluster.py": {"fabric", "cloudpickle"},
    # Only the type checker needs it.
    "protocol/message.py": {"typing_extensions"},
    # It travels with the function.
    "node/job/ranks/run_function.py": {"cloudpickle"},
    "node/pickled_functions.py": {"cloudpickle"},
    "node/job/ranks/fast_torchrun.py": {"torch"},  # it is torchrun
}
# A folder with more files and folders is hard to survey.
MOST_CHILDREN = 12
CROWDED = {"head": 17, "common": 13}
# These are the imports between the rooms of the head.
MOST_ARROWS = 66
LONGEST_FUNCTION = 50


def room(path: Path) -> str:
    """The folder that a file is in, as FLOORS names it; a file at the top is a room of its own."""
    parts = path.relative_to(HOUSE).parts
    if parts[0] in ROOMS_INSIDE and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0].removesuffix(".py")


# The dotted name of each file and folder below `orchestrator.` -> its room.
ROOMS = {
    ".".join(path.relative_to(HOUSE).parts).removesuffix(".__init__.py").removesuffix(".py"): (
        room(path)
    )
    for path in FILES
}


def room_of_import(name: str) -> str:
    """The room of `orchestrator.` + name, where name may end with something inside a module."""
    while name and name not in ROOMS:
        name = name.rpartition(".")[0]
    return ROOMS.get(name, "__init__")


@functools.cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


def statements(text: str) -> Iterator[ast.AST]:
    """Every statement, wherever it stands; most of a tree is below them."""
    left: list[ast.AST] = [tree(text)]
    while left:
        yield (statement := left.pop())
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            inside = getattr(statement, part, [])
            left += inside if isinstance(inside, list) else []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in statements(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def show(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def wing(here: str) -> str:
    return next((name for name, rooms in WINGS.items() if here in rooms), "core")


def forbidden_imports(path: Path) -> Iterator[str]:
    """Yield the imports that come from above, from another wing, or from third-party packages."""
    here = room(path)
    others = OTHERS.get(here, set()) | OTHERS.get(show(path), set())
    for line, name in imports(path):
        head, _, rest = name.partition(".")
        if head == "orchestrator":
            there = room_of_import(rest)
            below = there == here or FLOORS.index(there) < FLOORS.index(here)
            allowed = below and (wing(there) in ("core", wing(here)) or here == "__init__")
        else:
            allowed = head in sys.stdlib_module_names | others
        if not allowed:
            yield f"{show(path)}:{line}: {here} may not import {name}"


def test_imports_run_one_way() -> None:
    assert [line for path in FILES for line in forbidden_imports(path)] == []


def test_top_directory_has_known_entries_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    found = {name.split("/")[0] for name in listed.stdout.decode().split("\0") if name}
    # A checkout without git lists no files.
    assert found <= TOP, found - TOP


def test_every_planned_room_exists() -> None:
    assert set(FLOORS) == {room(path) for path in FILES}


def imported_files(path: Path) -> set[Path]:
    """The files of ours that a file imports, wherever the import stands."""
    found = set()
    for _, name in imports(path):
        parts = name.split(".")
        for count in range(len(parts), 1, -1):
            file = HOUSE.parent.joinpath(*parts[:count]).with_suffix(".py")
            if file.exists():
                found.add(file)
                break
    return found


def test_imports_have_no_circle() -> None:
    needs = {path: imported_files(path) - {path} for path in FILES}
    # It imports a name only on its first use.
    needs[HOUSE / "__init__.py"] = set()
    while sizes := sum(map(len, needs.values())):
        for path, known in needs.items():
            needs[path] = known.union(*(needs[other] for other in known))
        if sum(map(len, needs.values())) == sizes:
            break
    assert {show(path) for path, known in needs.items() if path in known} == set()


def test_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(show(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Functions of one word that other modules use, and are clear alone.
CLEAR_ALONE = {
    # Commands of click: typed as they are named.
    *("checkpoint", "dashboard", "profile", "prune", "report", "rerun", "track", "cli"),
    # Programs, and what they start.
    *("main", "launch"),
    # To the terminal, as print(), and of a few words there.
    *("say", "tell", "complain", "plural"),
    # As they are called in pickle, torch, Linux and statistics.
    *("dump", "dumps", "autocast", "barrier", "prctl", "median"),
    # Decorates the function that answers a kind of request.
    "answers",
}


# A name that is imported alone, or seen in a stack trace, says what it is about.
def test_function_for_other_modules_carries_its_noun() -> None:
    used, short = set[str](), set[str]()
    for path in FILES:
        module = tree(text := path.read_text("utf-8"))
        place, names = ".".join(path.relative_to(ROOT).with_suffix("").parts), imported_names(text)
        used |= {*names.values()} | {
            f"{names.get(getattr(node.value, 'id', ''))}.{node.attr}"
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute)
        }
        short |= {
            f"{place}.{node.name}"
            for node in module.body
            if isinstance(node, ast.FunctionDef) and "_" not in node.name
        }
    assert {name for name in used & short if name.split(".")[-1] not in CLEAR_ALONE} == set()


def test_constant_is_assigned_once() -> None:
    places: dict[str, int] = {}
    for path in FILES:
        for statement in tree(path.read_text(encoding="utf-8")).body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    name = f"{show(path)}: {target.id}"
                    places[name] = places.get(name, 0) + 1
    assert {name: count for name, count in places.items() if count > 1} == {}


def test_folders_have_at_most_twelve_children() -> None:
    children: dict[Path, set[str]] = {}
    for path in FILES:
        if path.name != "__init__.py":
            children.setdefault(path.parent, set()).add(path.name)
        for folder in path.relative_to(HOUSE).parents:
            if folder != Path():
                children.setdefault((HOUSE / folder).parent, set()).add(folder.name)
    del children[HOUSE]
    crowded = {show(path): len(names) for path, names in children.items()}
    assert {name: count for name, count in crowded.items() if count > MOST_CHILDREN} == CROWDED


def test_arrows_between_head_rooms_are_bounded() -> None:
    arrows = {
        (room(path), room_of_import(name.partition(".")[2]))
        for path in FILES
        if room(path).startswith("head/")
        for _, name in imports(path)
        if name.startswith("orchestrator.head.")
    }
    assert len({(here, there) for here, there in arrows if here != there}) <= MOST_ARROWS


def test_forbidden_import_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOUSE", tmp_path)
    (tmp_path / "node/job").mkdir(parents=True)
    for text in (
        "def f():\n    from orchestrator.head.screen import output",
        "import orchestrator.head.plan.plan",
        "def f():\n    import torch",
        "from orchestrator.engine.trainer import Trainer",
        "from .. import config",
    ):
        (tmp_path / "node/job/bad.py").write_text(text)
        assert list(forbidden_imports(tmp_path / "node/job/bad.py"))


def test_node_code_parses_as_python_3_9() -> None:
    for path in FILES:
        if room(path).startswith(("common", "node", "protocol")):
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))


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
def test_start_imports_nothing_heavy(words: list[str]) -> None:
    command = [sys.executable, "-c", WEIGHT, "", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    help_text, _, loaded = done.stdout.rpartition("loaded ")
    assert ("SCRIPT [ARGS...]" in help_text) == bool(words)
    heavy = {"torch", "paramiko", "numpy", "yaml", "cryptography", "rich"}
    assert not heavy & set(loaded.split())


def test_supervisor_imports_nothing_slow() -> None:
    """Each node starts one for each attempt: dataclasses and inspect take 6 ms."""
    code = "import sys, orchestrator.node.job.supervisor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"dataclasses", "inspect", "asyncio", "typing_extensions"}


def test_fabric_is_imported_by_first_login_alone() -> None:
    """It takes 0.2 s, and invoke is most of that."""
    code = "import sys, orchestrator.head.connect.ssh; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "orchestrator.head.connect.ssh" in loaded
    assert not loaded & {"asyncio", "fabric", "invoke", "paramiko"}


# -- one way to the terminal -------------------------------------------------------------------

# Who may write there: these clean what they write, or write nothing but words of our own.
MOUTHS = {"head/screen/output.py", "head/screen/screen.py", "common/interrupt.py"}


WRITES = re.compile(r"print|echo|input|confirm|std|os\.write")


def writes_to_the_terminal(path: Path) -> Iterator[int]:
    """The lines of a file that write to the terminal by themselves."""
    text = path.read_text(encoding="utf-8")
    if not WRITES.search(text):
        return
    for node in ast.walk(tree(text)):
        if isinstance(node, ast.Call):
            called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            direct = called in ("print", "click.echo", "click.secho", "input", "click.confirm")
            stream = called.startswith(("sys.stdout.write", "sys.stderr.write", "sys.__std"))
            if direct or stream or (called == "os.write" and first in ("1", "2")):
                yield node.lineno


def test_one_module_writes_to_terminal() -> None:
    """That module cleans text from nodes, files and strangers, so that no escape gets through."""
    shown = {
        f"{show(path)}:{line}"
        for path in FILES
        if room(path).split("/")[0] not in ("engine", "node") and show(path) not in MOUTHS
        for line in writes_to_the_terminal(path)
    }
    assert shown == set()


def test_write_to_terminal_is_detected(tmp_path: Path) -> None:
    for text in ("print(1)", "import sys\nsys.stderr.write('')", "import os\nos.write(2, b'')"):
        (tmp_path / "bad.py").write_text(text)
        assert list(writes_to_the_terminal(tmp_path / "bad.py"))


# Who asks whether JSON is wanted: these show a live screen, ask a question or keep what comes else.
ASK_FOR_JSON = {
    *("head/screen/output.py", "head/status/status.py", "views/top/command.py"),
    *("head/commands/launch.py", "head/commands/stop.py"),
    "head/commands/machines/exec.py",
}


def test_one_function_prints_json() -> None:
    """A command gives print_result() its data and its words, and does not ask which is wanted."""
    asks = {show(path) for path in FILES if "as_json()" in path.read_text(encoding="utf-8")}
    assert asks == ASK_FOR_JSON


# -- third-party attributes are not replaced ----------------------------------------------------

# Settings that their owners mean to be set.
SETTINGS = ("sys.", "os.environ", "torch.backends.")


def imported_names(text: str) -> dict[str, str]:
    """Name in a module -> the dotted name of what it imports."""
    names = {}
    for node in ast.walk(tree(text)):
        if isinstance(node, ast.Import):
            names.update({(a.asname or a.name).split(".")[0]: a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def assigned(node: ast.AST) -> Iterator[ast.expr]:
    """The targets of a statement, and of setattr() and delattr()."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        yield from node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        yield node.target
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        name = node.args[1]
        yield ast.Attribute(node.args[0], str(getattr(name, "value", "?")))


def replaced(path: Path) -> set[str]:
    """The attributes of imported modules and classes, not our own, that a file sets."""
    text, found = path.read_text(encoding="utf-8"), set()
    names = imported_names(text)
    for node in ast.walk(tree(text)):
        for target in assigned(node):
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            for part in parts:
                base, inner = part, part
                while isinstance(base, (ast.Attribute, ast.Subscript)):
                    base = base.value
                if inner is base or not isinstance(base, ast.Name) or base.id not in names:
                    continue
                dotted = names[base.id] + ast.unparse(inner).removeprefix(base.id)
                if not dotted.startswith((*SETTINGS, "orchestrator.")):
                    found.add(dotted)
    return found


def test_no_attribute_of_other_library_is_set() -> None:
    found = {show(path): names for path in FILES if (names := replaced(path))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import paramiko\nparamiko.transport.time = None",
        "import threading as t\nt.Thread = None",
        "from torch import nn\nnn.Linear.forward = None",
        "import invoke\nsetattr(invoke, 'run', None)",
        "import fabric\ndel fabric.Connection",
        "from paramiko import Transport\nTransport.a, b = 1, 2",
    ],
)
def test_attribute_set_is_detected(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    assert len(replaced(tmp_path / "bad.py")) == 1


# -- torch's public names -----------------------------------------------------------------------

# Names without a promise of torch's that the engine uses, and why there is no public one.
# Each is tried on torch 2.8, on 2.13, which is the pinned version, and on 2.15.
PRIVATE = {
    # The moment at which all gradients are computed: DDP waits in a callback of the same queue.
    "_execution_engine",
    # The hooks of a tensor: fully_shard drops those of a parameter without a word.
    "_backward_hooks",
    # The module that torch.compile() was given.
    "_orig_mod",
    # The timeout of groups that a DeviceMesh makes; public as set_timeout() from 2.14 on.
    "_set_pg_timeout",
    # The wrapper of activation checkpointing, which torch documents by this path.
    "torch.distributed.algorithms._checkpoint",
}
# Documented in spite of the underscore, operators by name, and Python's own.
DOCUMENTED = ("torch._foreach_", "torch.ops.aten.", "os._exit", "sys._getframe")
OF_TUPLES = {"_replace", "_asdict", "_fields"}
# Names in torch's checkpoints, which the reader allows.
PICKLED = {"_StorageInfo", "_get_layout"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(text: str) -> set[str]:
    """The private names that a file defines itself: functions, classes, attributes of self."""
    found = set()
    for node in ast.walk(tree(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_names(path: Path, own: set[str]) -> Iterator[str]:
    """The private names of torch and of other objects that a file uses."""
    for node in ast.walk(tree(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")
                first = next((n for n, part in enumerate(parts) if is_private(part)), None)
                if first is not None:
                    yield ".".join(parts[: first + 1])
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            dotted, base = ast.unparse(node), ast.unparse(node.value)
            ours = base in ("self", "cls", "super()") or node.attr in own
            if not (ours or node.attr in OF_TUPLES or dotted.startswith(DOCUMENTED)):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A name in a string may reach getattr() by any way.
            name = node.value
            if is_private(name) and name.isidentifier() and name not in own | OF_TUPLES | PICKLED:
                yield name


def private_names_of_engine() -> set[str]:
    files = [path for path in FILES if room(path).startswith("engine")]
    own = set().union(*(own_names(path.read_text(encoding="utf-8")) for path in files))
    return {name for path in files for name in private_names(path, own)}


def test_engine_uses_public_names_of_torch() -> None:
    assert private_names_of_engine() == PRIVATE
    assert len(PRIVATE) <= 5


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils import _pytree",
        "from torch.distributed._tensor import DTensor",
        "def f(optimizer):\n    return optimizer._step_count",
        "import torch\ntorch._fused_adamw_()",
        "def f(model):\n    return getattr(model, '_orig_mod')",
        "NAMES = ('_backward_hooks',)\ndef f(x):\n    return [getattr(x, name) for name in NAMES]",
    ],
)
def test_private_name_is_detected(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    assert len(list(private_names(tmp_path / "bad.py", set()))) == 1


def test_the_trainer_is_a_class_of_one_screen() -> None:
    """Its code without docstrings: settings, checkpoints and reports are objects beside it."""
    module = ast.parse((HOUSE / "engine/trainer.py").read_text(encoding="utf-8"))
    (trainer,) = (node for node in module.body if isinstance(node, ast.ClassDef))
    for node in ast.walk(trainer):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            del node.body[0]
    assert len(ast.unparse(trainer).splitlines()) <= 60


# -- budgets ----------------------------------------------------------------------------------

# Statements of a room. An addition above the budget names the removal that pays for it.
BUDGETS = {
    "common": 1055,
    "config": 926,
    "cli": 669,
    "api": 477,
    "launchers": 372,
    "local_cluster": 356,
    "protocol": 1399,
    "records": 1703,
    "engine": 224,
    "engine/core": 1932,
    "engine/data": 672,
    "engine/models": 574,
    "engine/observe": 742,
    "engine/ranks": 527,
    "engine/verify": 330,
    "engine/saving": 1558,
    "engine/sharding": 433,
    "head/connect": 1300,
    "head/events": 346,
    "head/follow": 2278,
    "head/background": 142,
    "head/commands": 1918,
    "head/doctor": 544,
    "head/environments": 351,
    "head/exec": 250,
    "head/init": 289,
    "head/nodes": 689,
    "head/prune": 284,
    "head/schedulers": 432,
    "head/screen": 1084,
    "head/status": 438,
    "head/plan": 1088,
    "head/start": 1873,
    "head/transfer": 1219,
    "node/job": 2593,
    "node/peers": 413,
    "node/start": 585,
    "node/transfer": 848,
    "node/warm": 474,
    "node/environments": 179,
    "node/follow": 315,
    "node/machine": 1184,
    "node/server": 393,
    "node": 142,
    "traces": 287,
    "trackers": 187,
    "views": 25,
    "views/dashboard": 351,
    "views/profile": 179,
    "views/report": 602,
    "views/top": 828,
    "views/track": 360,
    "views/verify": 230,
}


def test_rooms_keep_budgets() -> None:
    weights = dict.fromkeys(BUDGETS, 0)
    for path in FILES:
        if room(path) in weights:
            nodes = ast.walk(tree(path.read_text(encoding="utf-8")))
            weights[room(path)] += sum(isinstance(node, ast.stmt) for node in nodes)
    assert {name: size for name, size in weights.items() if size > BUDGETS[name]} == {}


# -- time limits ------------------------------------------------------------------------------


def defined_limits(path: Path) -> set[str]:
    names = re.findall(r"^([A-Z_]+) = [\w.*+ ]*[\d.]+$", path.read_text("utf-8"), re.MULTILINE)
    return set(names)


# So a limit is named that says how long one machine or process waits for another.
WAITS = re.compile(
    r"(.*_)?(ANSWER|AWAY|CUT_OFF|LAST_WORD|LOST|PATIENCE|RELEASE|RETRY|RETURN|RIVALS|SEEN_WITHIN"
    r"|SILENCE|TIMEOUT|TOLD)(_SECONDS)?"
)


def test_time_outs_are_defined_once() -> None:
    """They stand in protocol/timing.py, each once."""
    table = HOUSE / "protocol/timing.py"
    known = defined_limits(table)
    again = {
        show(path): names
        for path in FILES
        if path != table
        for names in [{n for n in defined_limits(path) if n in known or WAITS.fullmatch(n)}]
        if names
    }
    assert known and again == {}


# -- short ------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    long = {}
    for path in FILES:
        for node in statements(path.read_text(encoding="utf-8")):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or 0) - node.lineno + 1
                count -= len((ast.get_docstring(node) or "").splitlines())
                if count > LONGEST_FUNCTION:
                    long[f"{show(path)}: {node.name}"] = count
    assert long == {}
