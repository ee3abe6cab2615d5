"""Redact possible secrets in records and tables.

Only listed variables of the head's environment are recorded, because a secret may have any name.
Values that the user typed are not recorded if they look like a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orchestrator.common.hiding import (
    NAME,
    REDACTED,
    hide_secrets,
    is_no_word,
    is_secret,
    redacted_text,
    secret_texts,
)
from orchestrator.head.plan.model import EnvSetting, Plan

NOT_SHOWN = "(not shown)"
YOURS = "(yours)"
SHOWN = re.compile(
    r"(NCCL|RCCL|GLOO|UCX|UCC|CUDA|HIP|ROCR|ROCM|HSA|GPU|NVIDIA|TORCH|TORCHELASTIC|PYTORCH|TRITON"
    r"|OMP|KMP|MKL|OPENBLAS|SLURM|SBATCH|PBS|LSB|LC|ORCHESTRATOR)_\w+"
    r"|(LD_LIBRARY_|LD_|PYTHON)?PATH|LD_PRELOAD|PYTHON[A-Z]+|LANG|LANGUAGE|HOME|USER|LOGNAME|SHELL"
    r"|PWD|OLDPWD|HOSTNAME|TERM|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|CONFIG_FILE"
    r"|MASTER_ADDR|MASTER_PORT|NNODES|NODE_RANK|NODE_IP|NPROC_PER_NODE|WORLD_SIZE|RANK|LOCAL_RANK"
)


def redact_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with values redacted if name or value suggests a secret."""
    return {
        name: REDACTED if NAME.search(name) else redacted_text(value)
        for name, value in sorted(env.items())
    }


def listed_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with values shown only for names on the list."""
    return {
        name: value if is_listed(name) else NOT_SHOWN
        for name, value in redact_variables(env).items()
    }


def is_listed(name: str) -> bool:
    return bool(SHOWN.fullmatch(name)) and not NAME.search(name)


def looks_plain(name: str, value: str) -> bool:
    """Return True if a variable of the user is listed, or its value does not look like a token."""
    return is_listed(name) or value.startswith("/") or not is_no_word(value)


def redact_plan(plan: Plan) -> Plan:
    """Return the plan with all secrets redacted, also inside messages and other values."""
    settings = [setting for node in plan.nodes for setting in node.settings]
    return hide_secrets(
        plan, secret_texts({s.value for s in settings if s.secret or is_secret(s.name, s.value)})
    )


def value_of(setting: EnvSetting) -> str:
    """Return the value of a setting for display, redacted if it may be a secret."""
    if setting.secret:
        return REDACTED
    if setting.why.startswith("--") and not looks_plain(setting.name, setting.value):
        return YOURS
    return redact_variables({setting.name: setting.value})[setting.name]


def shown_settings(chosen: Sequence[EnvSetting]) -> dict[str, str]:
    """Return the effective values by name for display, redacted if they may be secrets."""
    # Later settings override earlier ones.
    values = {setting.name: value_of(setting) for setting in chosen}
    return dict(sorted(values.items()))


def redacted_command(command: Sequence[str]) -> list[str]:
    """Return a command line without the secrets of `--env A=X`, `--token X` or `NAME_TOKEN=X`."""
    shown = []
    before = ""
    for word in command:
        name, equals, _ = word.partition("=")
        assignment = env_in(before, word)
        # The option takes a name. NAME=VALUE is rejected later, and its value is redacted.
        if before == "--secret" or name == "--secret":
            shown.append(f"{name}={REDACTED}" if equals and before == "--secret" else word)
        elif assignment and (NAME.search(assignment[1]) or not looks_plain(*assignment[1:])):
            shown.append(f"{assignment[0]}{assignment[1]}={REDACTED}")
        elif equals and NAME.search(name.lstrip("-").replace("-", "_")):
            shown.append(f"{name}={REDACTED}")
        elif before.startswith("-") and NAME.search(before.lstrip("-").replace("-", "_")):
            shown.append(REDACTED)
        else:
            shown.append(redacted_text(word))
        before = "" if equals else word
    return shown


def env_in(before: str, word: str) -> tuple[str, str, str] | None:
    """Split `--env=A=X`, or `A=X` after `--env`, into the option's text, name and value."""
    option = "" if before == "--env" else "--env="
    name, equals, value = word.removeprefix(option).partition("=")
    return (option, name, value) if equals and word.startswith(option) else None


def env_apart(arguments: Sequence[str], program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a launch's arguments without the values of --env, and these values by name."""
    end = len(arguments) - len(program)
    words: list[str] = []
    values: dict[str, str] = {}
    for word in arguments[:end]:
        shown = word
        if assignment := env_in(words[-1] if words else "", word):
            option, name, values[name] = assignment
            shown = option + name
        words.append(shown)
    return [*words, *arguments[end:]], values
