"""The variables that the user gives to every rank: --env, files, secrets, and the hook's."""

from __future__ import annotations

import getpass
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.common import hiding
from orchestrator.common.errors import UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.plan import redact
from orchestrator.head.plan.model import EnvSetting

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$", "'": "'"}
# NAME, NAME=VALUE, and a value in single or double quotes; a # behind a space begins a comment.
ASSIGNMENT = re.compile(
    r"""(?:export\s+)?([A-Za-z_]\w*)\s*(?:(=)\s*(?:'([^']*)'|"((?:[^"\\]|\\.)*)"|([^'"\0][^\0]*?|)))?"""
    r"""(?:\s+\#.*)?"""
)


def given(arguments: LaunchArguments, environ: Mapping[str, str]) -> tuple[EnvSetting, ...]:
    """Return the variables in the order in which later ones win, each with its source."""
    settings: list[EnvSetting] = []
    for path in arguments.env_file:
        for name, value in read_file(path, environ).items():
            settings.append(of_file(name, value, path))
    for name, value in user_env(arguments.env, environ).items():
        secret = hiding.is_secret(name, value)
        settings.append(EnvSetting(name, value, "--env", yours=True, secret=secret))
    for name in arguments.secret:
        value = secret_value(name, environ)
        settings.append(EnvSetting(name, value, "--secret", yours=True, secret=True))
    return tuple(settings)


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


# -- the hook ---------------------------------------------------------------------------------

# A shell file of the user's that each node runs; what it exports reaches the ranks.


def read_hook(path: str | None) -> str:
    """Read the hook; one that has only comments is empty, and needs no shell on every node."""
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"the hook {path} cannot be read: {error.strerror}") from error
    lines = (line.strip() for line in text.splitlines())
    return text if any(line and not line.startswith("#") for line in lines) else ""


def named_by_hook(text: str) -> frozenset[str]:
    """List the variables that a hook names before it is run; it may set them on some nodes."""
    return frozenset(re.findall(r"\bNCCL_[A-Z_]+", text))


def digest_of_hook(text: str) -> str:
    """Return what tells one hook from another; nothing where there is none."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() if text else ""
