"""Reads the settings of a run that people compare: its config, and the options of its program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.config import resolved
from orchestrator.records.experiment import Experiment, JobRecord

OPTION = re.compile(r"--?([A-Za-z][\w.-]{0,80})(?:=(.*))?", re.DOTALL)
ASSIGNED = re.compile(r"\+{0,2}([A-Za-z][\w./-]{0,80})=(.*)", re.DOTALL)  # as Hydra has it
PROGRAM = re.compile(r"\.(py|sh|ipynb)$")
NUMBER = re.compile(r"-[0-9.]")
LONGEST_VALUE = 100
APART = ("launch", "nodes")  # sections of a config that say how, and not what, is trained
MOST = 400

Section = dict[str, Any]  # a key, with dots for what is inside, and its value


def of(experiment: Experiment, record: JobRecord) -> dict[str, str]:
    """Return each setting by its name; a config that cannot be read has none."""
    try:
        config = resolved.read(experiment.path)
    except UsageError:
        config = {}
    trained = {name: value for name, value in config.items() if name not in APART}
    found = {name: shown(value) for name, value in flat(trained).items()}
    found |= {name: shown(value) for name, value in options(arguments(record.command))}
    return dict(list(found.items())[-MOST:])


def mapping(data: Any) -> dict[str, Any]:
    """Return data that nobody has checked, if they are a mapping."""
    return {str(key): value for key, value in data.items()} if isinstance(data, dict) else {}


def flat(data: Mapping[str, Any], before: str = "") -> Section:
    """Return nested keys as one level, with dots between them."""
    section: Section = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            section.update(flat(mapping(value), f"{name}."))
        else:
            section[name] = value
    return section


def arguments(command: Sequence[str]) -> Sequence[str]:
    """Return what follows the program in a launch; without one, the overrides of the config."""
    for at, word in enumerate(command[1:], 2):
        if PROGRAM.search(word) or command[at - 2] in ("-m", "--module"):
            return command[at:]
    return [word for word in command if ASSIGNED.fullmatch(word)]


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield --name value, --name=value, a flag alone, and name=value."""
    words = list(words)
    while words:
        word = words.pop(0)
        if match := OPTION.fullmatch(word):
            if match[2] is not None:
                yield match[1], match[2]
            elif words and is_value(words[0]):
                yield match[1], words.pop(0)
            else:
                yield match[1], "yes"
        elif match := ASSIGNED.fullmatch(word):
            yield match[1], match[2]


def is_value(word: str) -> bool:
    return not word.startswith("-") or NUMBER.match(word) is not None


def shown(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def differing(every: Sequence[Mapping[str, str]], most: int) -> list[str]:
    """Return the names whose values are not the same in all, as many as there is room for."""
    names = dict.fromkeys(name for each in every for name in each)
    differ = (name for name in names if len({each.get(name) for each in every}) > 1)
    return [name for name, _ in zip(differ, range(most), strict=False)]
