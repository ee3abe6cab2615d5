"""Reads manifest.json, which describes a launch so that it can be repeated or explained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.program import tree_title
from orchestrator.protocol.message import parse_object
from orchestrator.records.experiment import Experiment

NAME = "manifest.json"
LARGEST_BYTES = 64 << 20
MISSING = re.compile(r"FileNotFoundError: .*?'([^']+)'")
SNAPSHOT = r".*/code/snapshots/[^/]+/"


def read_manifest(experiment: Experiment) -> dict[str, Any]:
    """Return the manifest, or {} if there is none. Its values are not validated."""
    try:
        with files.open_directory(experiment.path) as directory:
            return parse_object(files.read_plain(NAME, directory, LARGEST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{experiment.path / NAME} cannot be read: {error}") from error


def working_tree(experiment: Experiment) -> str:
    """Return the directory whose code the job runs, or an empty string if it is unknown."""
    try:
        return str(read_manifest(experiment).get("directory") or "")
    except UsageError:
        return ""


def send_hint(experiment: Experiment, message: str) -> str:
    """Return a hint on how to send a file that a rank misses and the launch directory has.

    Most such files are data that git ignores: the code that nodes receive does not contain them.
    """
    missing = MISSING.match(message)
    try:
        known = read_manifest(experiment) if missing else {}
        title = re.escape(tree_title(str(known.get("directory"))))
        path = re.sub(f"{SNAPSHOT}{title}/", "", missing[1]) if missing else ""
        if not known.get("tree") or not (Path(str(known.get("directory"))) / path).exists():
            return ""
    except (OSError, ValueError, UsageError):
        return ""
    if path.startswith("/"):
        return f"it is here and not there: orchestrator push {shlex.quote(path)} brings it"
    inside = path.rpartition("/")[0]
    setting = shlex.quote(f"sync.include=[{inside + '/*' if inside else path}]")
    return (
        f"{path} is in your directory and was not sent with the code: --set {setting} sends it;"
        " what is too large for that comes with `orchestrator push`, to a path that you give the"
        " program"
    )
