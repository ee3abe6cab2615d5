"""Says what to type where uv or pip says that packages cannot be had. Pure."""

from __future__ import annotations

import re
import shlex
import sys

from orchestrator.head.nodes.packages import package_of

PIP = f"{sys.executable} -m pip"
VERSIONS = f"`{PIP} index versions NAME` lists what the index has"
OTHER_INDEX = (
    "packages of another: PIP_EXTRA_INDEX_URL=URL orchestrator bootstrap ..., or --find-links DIR"
)
NO_INDEX = (
    "no index was asked (--no-index): leave it out, or name a directory of wheels: --find-links DIR"
)


def build(place: str) -> str:
    words = f"python -m pip wheel --no-deps -w wheels {shlex.quote(place)}"
    return f"build one: {words}; and write its path instead"


# What they say, with the package's name, and what to do about it; the first that matches counts.
REFUSALS = (
    (re.compile(r"not found in the provided package locations|ignoring index"), NO_INDEX),
    (
        re.compile(
            r"[Bb]ecause (?P<uv>[\w.-]+) was not found|No matching distribution found for (?P<pip>"
            r"[\w.-]+)"
        ),
        f"check the spelling: {VERSIONS}; {OTHER_INDEX}",
    ),
    (
        re.compile(r"there (?:is|are) no versions? of (?P<uv>[\w.-]+?)[<>=~! ]"),
        f"name a version that there is: {VERSIONS}; {OTHER_INDEX}",
    ),
    (
        re.compile(r"(?P<uv>[A-Za-z][\w.-]*)(?:[<>=]\S+)? (?:has|have) no (?:usable )?wheels"),
        "no wheel fits the Python and the libc of these nodes: name another version"
        f" ({VERSIONS}), choose another Python (--python), or {build('NAME')}",
    ),
    (
        re.compile(
            r"Failed to fetch|error sending request|Max retries exceeded|Failed to establish"
        ),
        f"this machine does not reach that index: see `{PIP} config list`, PIP_INDEX_URL and"
        " https_proxy; without an index: --no-index --find-links DIR",
    ),
    (
        re.compile(r"No module named pip\b"),
        f"it is pip that downloads: {sys.executable} -m ensurepip",
    ),
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        "make room on this machine, or export XDG_CACHE_HOME=/larger/disk: downloads go there",
    ),
    (
        re.compile(r"Couldn't parse requirement|Invalid requirement"),
        "write versions as for pip: name==1.2, name>=1,<2, name[extra]",
    ),
)


def fix_of(said: str) -> str:
    """Return what to do about what uv or pip said last; nothing where it is not known."""
    text = " ".join(said.split())  # uv breaks its lines at the width of a terminal
    for pattern, fix in REFUSALS:
        if match := pattern.search(text):
            name = next(filter(None, match.groups()), "")
            package = package_of(name.replace("-", "_")) if name else ""
            if package.startswith("git+") or normal(package) == normal(name):
                return fix.replace("NAME", name or "NAME")
            return f"the module {name} is in the package {package}: name that"
    return ""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def of_directory(place: str) -> tuple[str, str]:
    """Say that a directory is no package, and what to do."""
    what = f"{place} is a directory, and the nodes are sent wheels"
    return (
        what,
        f"{build(place)}, or -e {place} in a requirements.txt where what it needs is enough",
    )
