"""What pyproject.toml cannot say: the version, from git, and a README that holds without a clone.

The source says which release it leads to (`0.2.0.dev0`). A wheel, or an archive of the source, of a
commit with the tag `v0.2.0` is that release; of any other commit it is `0.2.0.dev0+g<commit>`, with
`.edited` after it where files were changed. Where there is no git, the version is as it stands.
An installation with `pip install -e` calls itself `0.2.0.dev0`, as its code changes under it; pip
knows the commit that it was made from.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SOURCE = Path("orchestrator/common/version.py")
# Where the repository can be read by anybody, such as https://example.org/us/orchestrator; what is
# shown in a package index links to there. With none, its links within the repository are text.
ADDRESS = ""


def git(*words: str) -> str:
    """Return what git says of this very directory, or nothing."""
    try:
        command = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def version() -> str:
    """Return the version that a wheel made now has."""
    stated = re.findall(r'__version__ = "(.+)"', (ROOT / SOURCE).read_text(encoding="utf-8"))[0]
    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != ROOT or not stated.endswith(".dev0"):
        return str(stated)
    release = stated.removesuffix(".dev0")
    tags = [tag for tag in git("tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    edited = git("status", "--porcelain", "--untracked-files=no")
    if tags and not edited:
        if f"v{release}" not in tags:
            raise SystemExit(f"{tags[0]} is on this commit, and {SOURCE} leads to {release}")
        return release
    return f"{stated}+g{git('rev-parse', '--short=9', 'HEAD')}{'.edited' if edited else ''}"


def readme(address: str, revision: str) -> str:
    """Return README.md with links and pictures that hold in a package index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = r"\((?!https?:|#)([^)\s]+)\)"
    if not address:
        text = re.sub(rf"^!\[[^\]]*\]{inside}\n+", "", text, flags=re.M)
        return re.sub(rf"\[([^\]]+)\]{inside}", r"\1", text)
    text = re.sub(rf"(!\[[^\]]*\]){inside}", rf"\1({address}/raw/{revision}/\2)", text)
    return re.sub(rf"(?<!!)(\[[^\]]+\]){inside}", rf"\1({address}/blob/{revision}/\2)", text)


def state_version(directory: str) -> None:
    """Write the version into the copy of the package that is packed."""
    path = Path(directory) / SOURCE
    text = path.read_text(encoding="utf-8")
    path.unlink()  # it may be a link to the source
    path.write_text(re.sub(r'"[^"]+"$', f'"{VERSION}"', text.rstrip()) + "\n", encoding="utf-8")


class BuildPackage(build_py):
    """Pack the package with its version."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            state_version(self.build_lib)


class PackSource(sdist):
    """Pack the source with its version."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        state_version(base_dir)


VERSION = version()
if __name__ == "__main__":
    release = VERSION.partition("+")[0]
    revision = "main" if "dev" in release else f"v{release}"
    urls: dict[str, Any] = {}
    if ADDRESS:
        pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
        urls = {name: f"{ADDRESS}/blob/{revision}/{path}" for name, path in pages.items()}
        urls = {"Source": ADDRESS, "Issues": f"{ADDRESS}/issues", **urls}
    setup(
        version=VERSION,
        long_description=readme(ADDRESS, revision),
        long_description_content_type="text/markdown",
        project_urls=urls,
        cmdclass={"build_py": BuildPackage, "sdist": PackSource},
    )
