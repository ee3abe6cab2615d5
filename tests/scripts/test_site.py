"""The documentation as a site: all pages are in it, and all links and anchors hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
ROOT = Path(__file__).parents[2]


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    """mkdocs.yml says `strict`: a warning about a page, a link or an anchor is an error."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert 'id="checkpoint-verify"' in commands and "--max-restarts" in commands
    api = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="clusterlaunch"' in api and 'id="orchestratordistributedbarrier"' in api
