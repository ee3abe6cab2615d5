"""The config that a launch has resolved and left with its experiment, as config.yaml.

It is written and read by libyaml where PyYAML has that: for each launch this takes 4 ms, not 20.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError

LARGEST_BYTES = 16 << 20


def read_text(experiment: Path) -> str:
    """Return the text of config.yaml, "" if it is missing; UsageError if it cannot be read."""
    path = experiment / "config.yaml"
    try:
        return files.read_plain(path, largest=LARGEST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def yaml_of(data: dict[str, Any]) -> str:
    """Return what the file of a config with these keys says."""
    import yaml

    return str(
        yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    )


def read_keys(experiment: Path) -> dict[str, Any]:
    """Return the keys of config.yaml, {} if it is missing; UsageError if it cannot be read."""
    # The import takes 10 ms, and text() does not need it.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        written = read_text(experiment)
        # We write none; a few lines of them become more than any memory holds.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(written, Loader=loader)):
            raise ValueError("it has YAML aliases")
        data = yaml.load(written, Loader=loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{experiment / 'config.yaml'} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def output_directories(experiment: Path) -> tuple[str, ...]:
    """Return the directories that the launch gave the program to write, below its own."""
    try:
        sync = read_keys(experiment).get("sync")
    except UsageError:
        return ()
    names = sync.get("outputs") if isinstance(sync, dict) else ()
    return tuple(str(name).strip("/") for name in names) if isinstance(names, list) else ()
