"""Read the variables that the user gives to every rank: files, patterns, --env and secrets."""

from __future__ import annotations

import fnmatch
import getpass
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.plan import redact
from orchestrator.head.plan.model import EnvSetting

# A pattern passes over what describes this machine and login; a name in full takes these, too.
OF_THIS_LOGIN = re.compile(
    r"HOME|PATH|PWD|OLDPWD|SHELL|SHLVL|USER|LOGNAME|HOSTNAME|MAIL|TERM|COLORTERM|COLUMNS|LINES|_"
    r"|TMPDIR|DISPLAY|WAYLAND_DISPLAY|VIRTUAL_ENV|PS[0-9]|LD_\w+|(SSH|XDG|DBUS|CONDA|BASH)_\w+"
    r"|BASH_FUNC_.*"
)

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$", "'": "'"}
# NAME, NAME=VALUE, and a value in single or double quotes; a # behind a space begins a comment.
ASSIGNMENT = re.compile(
    r"""(?:export\s+)?([A-Za-z_]\w*)\s*(?:(=)\s*(?:'([^']*)'|"((?:[^"\\]|\\.)*)"|([^'"\0][^\0]*?|)))?"""
    r"""(?:\s+\#.*)?"""
)


def read(arguments: LaunchArguments, environ: Mapping[str, str]) -> tuple[EnvSetting, ...]:
    """Return the variables in the order in which later ones win, each with its source."""
    settings: list[EnvSetting] = []
    for path in arguments.env_file:
        for name, value in read_file(path, environ).items():
            settings.append(of_file(name, value, path))
    for pattern in arguments.env_pass:
        for name in matching(pattern, environ):
            settings.append(yours(name, environ[name], "--env-pass"))
    for name, value in user_env(arguments.env, environ).items():
        settings.append(yours(name, value, "--env"))
    for name in arguments.secret:
        value = secret_value(name, environ)
        settings.append(EnvSetting(name, value, "--secret", yours=True, secret=True))
    return tuple(settings)


def yours(name: str, value: str, reason: str) -> EnvSetting:
    return EnvSetting(name, value, reason, yours=True, secret=hiding.is_secret(name, value))


def of_file(name: str, value: str, path: str) -> EnvSetting:
    """Describe a variable of a file, which is where secrets are kept, whatever they are called."""
    secret = hiding.is_secret(name, value) or not redact.looks_plain(name, value)
    return EnvSetting(name, value, f"--env-file {path}", yours=True, secret=secret)


def user_env(variables: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Read --env K=V, or --env K for the value that K has here (a secret need not be typed)."""
    env = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not is_name(name):
            raise UsageError(
                f"--env {variable}: {name!r} cannot name a variable", "write --env NAME=VALUE"
            )
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: it is not set here", f"write --env {name}=VALUE")
        env[name] = value if equals else environ[name]
    return env


def is_name(name: str) -> bool:
    return name.replace("_", "a").isalnum() and not name[:1].isdigit()


def matching(pattern: str, environ: Mapping[str, str]) -> list[str]:
    """List the variables of this environment that a pattern names, such as WANDB_*."""
    if not re.fullmatch(r"[\w*?\[\]!-]+", pattern):
        raise UsageError(
            f"--env-pass {pattern!r}: this is not a pattern of names", "write --env-pass 'WANDB_*'"
        )
    exact = not set(pattern) & set("*?[")
    return [
        name
        for name in sorted(environ)
        if is_name(name)
        and fnmatch.fnmatchcase(name, pattern)
        and (exact or not OF_THIS_LOGIN.fullmatch(name))
    ]


def notes(arguments: LaunchArguments, environ: Mapping[str, str]) -> list[str]:
    """Name the patterns that no variable matches."""
    return [
        f"--env-pass {pattern}: no variable of this environment matches it"
        for pattern in arguments.env_pass
        if not matching(pattern, environ)
    ]


# -- secrets ----------------------------------------------------------------------------------


def secret_value(name: str, environ: Mapping[str, str]) -> str:
    """Take a secret from the environment, or ask for it on the terminal without echo."""
    wanted, equals, _ = name.partition("=")
    if not is_name(wanted):
        raise UsageError("--secret takes the name of a variable", "write --secret NAME")
    if equals:
        raise UsageError(
            f"--secret {wanted}=...: other users of this machine can read command lines",
            f"export {wanted} and write --secret {wanted}, or leave it unset to be asked for it",
        )
    if wanted in environ:
        return environ[wanted]
    try:
        with Path("/dev/tty").open("rb"):
            value = getpass.getpass(f"{wanted} (not shown): ")
    except (OSError, EOFError) as error:
        raise UsageError(
            f"--secret {wanted}: it is not set here, and there is no terminal to ask for it",
            f"export {wanted} before the launch",
        ) from error
    if not value:
        raise UsageError(f"--secret {wanted}: nothing was typed", "type it again, or export it")
    return value


# -- files ------------------------------------------------------------------------------------


def read_file(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Read a file of NAME=VALUE lines; a wrong line is an error that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--env-file {path} cannot be read: {reason}") from error
    return parse(text, path, environ)


def parse(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse such lines; a name alone has the value that it has here."""
    env: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        found = ASSIGNMENT.fullmatch(line)
        if found is None:
            raise wrong(path, number, "a line is NAME=VALUE, NAME='VALUE', NAME or a # comment")
        name, equals, literal, double, plain = found.groups()
        if not equals and name not in environ:
            raise wrong(path, number, f"{name} has no value, and is not set here")
        if re.search(r"(?<!\\)\$\{", double or plain or ""):  # some programs replace it
            raise wrong(
                path, number, "${...} is not replaced here: write the value, or quote it by ''"
            )
        if double is not None:
            double = re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), double)
        value = next((one for one in (literal, double, plain) if one is not None), "")
        env[name] = value if equals else environ[name]
    return env


def wrong(path: str, number: int, what: str) -> UsageError:
    """Describe a wrong line, but do not show it: it may hold a secret."""
    return UsageError(f"--env-file {path}, line {number}: {what}")
