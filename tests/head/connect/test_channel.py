"""What travels to a node is all that runs there, where this package is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

from orchestrator.head.connect.channel import library

# The tests' own Python finds our sources by an editable install, which a node does not have.
ALONE = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
SCRIPT = """
import orchestrator, orchestrator.distributed
from orchestrator import Trainer
print(orchestrator.__file__, Trainer.__module__)
"""


def test_the_engine_and_a_users_imports_need_nothing_else(tmp_path: Path) -> None:
    for name, text in json.loads(zlib.decompress(library().blob)).items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "script.py").write_text(SCRIPT)
    node = tmp_path / "library/orchestrator/node/job"
    code = f"{ALONE}sys.path[0] = {str(node)!r}\nimport rank\n"
    code += "rank.run_python('script', 'script.py', [])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(tmp_path / "library/orchestrator/__init__.py"),
        "orchestrator.engine.trainer",
    ]
