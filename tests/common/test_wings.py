"""The core does without what its wings need, and a view says in one line what it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.common import wings
from orchestrator.common.errors import UsageError
from tests.launching import BIN, Command

HOUSE = Path(orchestrator.__file__).parent
OF_WINGS = ("jinja2", "textual", "starlette", "uvicorn", "torch")
# What Python runs first: as if these packages were not installed.
WITHOUT = f"""
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_WINGS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
"""


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    return {"PYTHONPATH": f"{tmp_path}:{HOUSE.parent}"}


def test_the_core_is_imported_without_what_its_wings_need(without: dict[str, str]) -> None:
    paths = (path.relative_to(HOUSE.parent) for path in HOUSE.rglob("*.py"))
    core = [path for path in paths if path.parts[1] not in ("views", "engine", "distributed.py")]
    names = [".".join(path.with_suffix("").parts) for path in core]
    names = [name for name in names if not name.endswith(("__main__", "fast_torchrun"))]
    assert len(names) > 200
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *names], env=without, check=True)


def test_the_dashboard_says_what_is_missing(without: dict[str, str], tmp_path: Path) -> None:
    command = Command([str(BIN / "orchestrator"), "dashboard"], tmp_path, without, anew=True)
    assert command.finish() == 2
    assert "`orchestrator dashboard` needs " in command.text
    assert "pip install jinja2 textual starlette uvicorn" in command.text
    assert "Traceback" not in command.text


def test_the_live_screen_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    live = wings.view("top").live
    for name in [name for name in sys.modules if name.startswith("orchestrator.views.top.screen")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(UsageError, match="`orchestrator top` needs textual"):
        live(nothing, nothing, 1.0)
    assert not wings.installed("textual") and wings.installed("click")


def test_a_defect_of_ours_is_no_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError):
        wings.view("none")
