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


def user_variables(
    arguments: LaunchArguments, environ: Mapping[str, str]
) -> tuple[EnvSetting, ...]:
    """Return the user's variables, each with its source; later ones win."""
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
    """Return a setting from a file; it is secret unless its value looks plain."""
    secret = hiding.is_secret(name, value) or not redact.looks_plain(name, value)
    return EnvSetting(name, value, f"--env-file {path}", yours=True, secret=secret)


def user_env(variables: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse --env K=V, or --env K with the value from this environment (so no secret is typed)."""
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
    """Return a secret from the environment, or prompt for it on the terminal without echo."""
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
    """Read a file of NAME=VALUE lines; raise UsageError with the number of a wrong line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--env-file {path} cannot be read: {reason}") from error
    return parse_variables(text, path, environ)


def parse_variables(text: str, path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse NAME=VALUE lines; a name alone takes its value from this environment."""
    env: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        found = ASSIGNMENT.fullmatch(line)
        if found is None:
            raise wrong_line(
                path, number, "a line is NAME=VALUE, NAME='VALUE', NAME or a # comment"
            )
        name, equals, literal, double, plain = found.groups()
        if not equals and name not in environ:
            raise wrong_line(path, number, f"{name} has no value, and is not set here")
        # Some programs expand ${NAME} in such files; passing it on unchanged would surprise.
        if re.search(r"(?<!\\)\$\{", double or plain or ""):
            raise wrong_line(
                path, number, "${...} is not replaced here: write the value, or quote it by ''"
            )
        if double is not None:
            double = re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), double)
        value = next((one for one in (literal, double, plain) if one is not None), "")
        env[name] = value if equals else environ[name]
    return env


def wrong_line(path: str, number: int, what: str) -> UsageError:
    """Return an error that names a wrong line without its text, which may hold a secret."""
    return UsageError(f"--env-file {path}, line {number}: {what}")


# -- the hook ---------------------------------------------------------------------------------

# The hook is a shell file of the user that each node runs; the ranks get the variables it exports.


def read_hook(path: str | None) -> str:
    """Return the hook's text, "" if it has only comments: then no node has to run a shell."""
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"the hook {path} cannot be read: {error.strerror}") from error
    lines = (line.strip() for line in text.splitlines())
    return text if any(line and not line.startswith("#") for line in lines) else ""


def digest_of_hook(text: str) -> str:
    """Return the SHA-256 digest of the hook's text, "" if there is no hook."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() if text else ""
