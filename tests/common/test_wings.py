"""The core imports nothing of what its wings need."""

import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator

HOUSE = Path(orchestrator.__file__).parent
OF_WINGS = ("jinja2", "textual", "starlette", "uvicorn", "torch")
# These are run and never imported.
ALONE = ("__main__", "fast_torchrun")
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


IMPORT = """
import importlib, sys
wing = sys.argv.index("views")
for name in sys.argv[1:wing]: importlib.import_module(name)
del sys.meta_path[0]
for name in sys.argv[wing + 1:]: importlib.import_module(name)
assert "torch" not in sys.modules
"""


def test_core_and_views_import_without_optional_packages(
    without: dict[str, str],
) -> None:
    """A head has no torch: only the engine and the programs of the user need it."""
    core, views = [], []
    for path in HOUSE.rglob("*.py"):
        parts = path.relative_to(HOUSE.parent).with_suffix("").parts
        if parts[1] not in ("engine", "distributed") and parts[-1] not in ALONE:
            (views if parts[1] == "views" else core).append(".".join(parts))
    assert len(core) > 200 and len(views) > 20
    words = [sys.executable, "-c", IMPORT, *core, "views", *views]
    subprocess.run(words, env=without, check=True)
