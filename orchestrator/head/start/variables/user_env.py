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

LARGEST_FILE_BYTES = 1 << 20
# A pattern passes over what describes this machine and login; a name in full takes these, too.
OF_THIS_LOGIN = re.compile(
    r"HOME|PATH|PWD|OLDPWD|SHELL|SHLVL|USER|LOGNAME|HOSTNAME|MAIL|TERM|COLORTERM|COLUMNS|LINES|_"
    r"|TMPDIR|DISPLAY|WAYLAND_DISPLAY|VIRTUAL_ENV|PS[0-9]|LD_\w+|(SSH|XDG|DBUS|CONDA|BASH)_\w+"
    r"|BASH_FUNC_.*"
)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$", "'": "'"}
ASSIGNMENT = re.compile(r"[ \t]*(?:export[ \t]+)?([^\s=#'\"]+)[ \t]*(=?)[ \t]*")
QUOTED = {
    '"': re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL),
    "'": re.compile(r"'([^']*)'"),
}
REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")


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
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--env-file {path} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise UsageError(f"--env-file {path} is larger than 1 MiB: these are no variables")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(path, data[: error.start].count(b"\n") + 1, "this is not UTF-8") from None
    return parse(text.replace("\r\n", "\n"), path, environ)


def parse(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse the text of such a file; a name alone has the value that it has here."""
    env: dict[str, str] = {}
    at, number = 0, 1
    while at < len(text):
        end = text.find("\n", at) + 1 or len(text)
        line = text[at:end].strip()
        after = end
        if line and not line.startswith("#"):
            start = ASSIGNMENT.match(text, at, end)
            if start is None or not is_name(start[1]):
                raise wrong(path, number, "a line is NAME=VALUE or a # comment")
            name = start[1]
            if start[2]:
                env[name], after = value_at(text, start.end(), end, path, number)
            elif text[start.end() : end].strip():
                raise wrong(path, number, f"'=' is missing after {name}")
            elif name not in environ:
                raise wrong(path, number, f"{name} has no value, and is not set here")
            else:
                env[name] = environ[name]
            if "\0" in env[name]:
                raise wrong(path, number, f"the value of {name} holds a NUL, which none can")
        number += text.count("\n", at, after)
        at = after
    return env


def value_at(text: str, at: int, end: int, path: str, number: int) -> tuple[str, int]:
    """Return the value that begins there, and the position behind its line."""
    mark = text[at : at + 1]
    if mark not in QUOTED:
        value = re.split(r"(?:^|[ \t])#", text[at:end].rstrip("\n"), maxsplit=1)[0].strip(" \t")
        refuse_expansion(value, path, number)
        return value, end
    quoted = QUOTED[mark].match(text, at)
    if quoted is None:
        raise wrong(path, number, f"nothing closes this {mark}")
    after = REST.match(text, quoted.end())
    if after is None:
        raise wrong(path, number, f"something follows the closing {mark}")
    value = quoted[1]
    if mark == '"':
        refuse_expansion(value.replace("\\$", ""), path, number)
        value = re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[0]), value, flags=re.DOTALL)
    return value, max(after.end(), end)


def refuse_expansion(value: str, path: str, number: int) -> None:
    """Refuse ${NAME}, which some programs replace and others take literally."""
    if "${" in value:
        raise wrong(path, number, "${...} is not replaced here: write the value, or quote it by ''")


def wrong(path: str, number: int, what: str) -> UsageError:
    """Describe a wrong line, but do not show it: it may hold a secret."""
    return UsageError(f"--env-file {path}, line {number}: {what}")
