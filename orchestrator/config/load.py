"""Load a Config from a YAML file and --set; later sources win."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError, nearest_file
from orchestrator.config import aorta
from orchestrator.config.parse import collect_fields, raise_problems, rest_field
from orchestrator.config.schema import Config, unread_values
from orchestrator.protocol.message import encode_value, hints_of

# These sections hold environment variables of the ranks.
VARIABLES = ("nccl", "env")
SECTIONS = {
    name: [item.name for item in dataclasses.fields(kind) if "rest" not in item.metadata]
    for name, kind in hints_of(Config).items()
    if dataclasses.is_dataclass(kind)
}


# A wheel contains the repository's config/ here.
SHIPPED = Path(__file__).parent / "files"
TIME = re.compile(r"[0-9]+(:[0-9]+)+$")
# The key `enabled` switches these sections on and off.
SWITCHED = ("compile", "profiling")


def found(file: Path) -> Path:
    """Return the path of a config file; a missing config/NAME is the one of this package."""
    inside = file.parts[:1] == ("config",) and not file.exists()
    shipped = SHIPPED.joinpath(*file.parts[1:])
    return shipped if inside and shipped.is_file() else file


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Apply a config file (or the defaults), then section.key=value."""
    return load_and_note(file, overrides)[0]


def load_and_note(file: Path | None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Load a config; return also notes on the keys of another program that it uses."""
    data: dict[str, Any] = {}
    if file is not None:
        try:
            text = found(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            near = nearest_file(file, (".yaml", ".yml"))
            raise UsageError(f"config {file} cannot be read: {reason}{near}") from error
        loaded = _parse(text, f"config {file}")
        if loaded is None:
            raise UsageError(
                f"config {file} is empty",
                "write sections such as `training:` into it, or {} for the defaults",
            )
        if not isinstance(loaded, dict):
            raise UsageError(f"config {file} must hold sections such as `training:`")
        data = loaded
        written = _parse(text, f"config {file}", as_written=True)
        data.update({section: written[section] for section in VARIABLES if section in data})
    for override in overrides:
        _override(data, override)
    translated = aorta.translate_config(data)
    problems = [UsageError(problem) for problem in translated.problems]
    problems += _take_misplaced(translated.data)
    return _checked(translated.data, problems), translated.notes


def _checked(data: dict[str, Any], problems: list[UsageError]) -> Config:
    """Build the config, or name all that is wrong with it, here and in what was found before."""
    sections, wrong = collect_fields(Config, data)
    problems += wrong
    for name in SWITCHED:
        inner = data.get(name)
        if name in sections and isinstance(inner, dict) and inner.get("enabled") is False:
            # A section that is switched off may keep its other keys.
            sections[name] = type(sections[name])()
    if problems:
        whole = {
            item.name: sections[item.name] if item.name in sections else item.default_factory()
            for item in dataclasses.fields(Config)
            if (item.name in sections or item.name not in data)
            and item.default_factory is not dataclasses.MISSING
        }
        problems += unread_values(whole)
    raise_problems(problems)
    return Config(**sections)


def config_as_data(config: Config) -> dict[str, Any]:
    """Return the config as nested dicts and lists, as YAML and JSON have them."""
    data: dict[str, Any] = encode_value(config)
    for name, kind in hints_of(Config).items():
        rest = rest_field(kind) if dataclasses.is_dataclass(kind) else None
        if rest:
            # The variables are keys of the section itself, as in the user's file.
            data[name].update(data[name].pop(rest))
    return data


def _parse(text: str, what: str, *, as_written: bool = False) -> Any:
    """Parse YAML. As written: 3.10 stays text, since the number would reach the ranks as 3.1."""
    import yaml

    kinds = (":bool", ":null") if as_written else (":bool", ":null", ":int", ":float", ":merge")

    # YAML 1.2 reads 2:4 as text; YAML 1.1 reads it as 124 seconds. JSON has no dates.
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [
                ("tag:yaml.org,2002:str", TIME),
                *((tag, regexp) for tag, regexp in known if tag.endswith(kinds)),
            ]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{what} is not valid YAML: {error}") from error


def _override(data: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: write section.key=value, such as training.max_steps=100")
    *sections, key = path.strip().split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        if not isinstance(data[section], dict):
            raise UsageError(f"--set {text}: {section!r} is a value, not a section")
        data = data[section]
    data[key] = _parse(value, f"--set {text}", as_written=path.split(".")[0] in VARIABLES)


def _take_misplaced(data: dict[str, Any]) -> list[UsageError]:
    """Remove each key in a wrong section; return errors that name the right section."""
    problems = []
    for section, inner in data.items():
        for key in list(inner) if isinstance(inner, dict) and section in SECTIONS else ():
            homes = [f"{other}.{key}" for other, keys in SECTIONS.items() if key in keys]
            if key not in SECTIONS[section] and homes:
                del inner[key]
                what = f"unknown key '{section}.{key}' in the config; did you mean {homes[0]!r}?"
                problems.append(UsageError(what))
    return problems
