"""The documentation as a site: all pages and examples are in it, all links hold."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.common.version import __version__

pytestmark = pytest.mark.slow

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; `strict` in mkdocs.yml makes an error of a warning about a link or an anchor."""
    site = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return site


def test_search_finds_words_of_newcomers(site: Path) -> None:
    docs = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    for word, page in (
        ("jupyter", "python_api"),
        ("exclude a node", "guide/nodes"),
        ("GPU use", "guide/views"),
        ("NCCL_SOCKET_IFNAME", "guide/network"),
        ("resume a job", "guide/failures"),
    ):
        found = {one["location"] for one in docs if word in html.unescape(one["text"])}
        assert any(place.startswith(f"{page}.html") for place in found), (word, found)


def test_site_has_version_and_neighbours(site: Path) -> None:
    page = (site / "guide/nodes.html").read_text(encoding="utf-8")
    for shown in (f"version {__version__}", "no public address", 'rel="next"', 'rel="prev"'):
        assert shown in page, shown


def test_site_has_generated_pages(site: Path) -> None:
    commands = html.unescape((site / "commands.html").read_text(encoding="utf-8"))
    assert 'id="checkpoint"' in commands and "--max-restarts" in commands
    assert "[quick|full|none]" in commands and "\\|" not in commands
    assert commands.count("Use this ssh_config in place of yours") == 1
    api = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="clusterlaunch"' in api and 'id="orchestratordistributedbarrier"' in api
    recipe, program = site / "recipes/ddp.html", ROOT / "scripts/examples/ddp.py"
    assert 'href="../examples/ddp.py"' in recipe.read_text(encoding="utf-8")
    assert (site / "examples/ddp.py").read_bytes() == program.read_bytes()
