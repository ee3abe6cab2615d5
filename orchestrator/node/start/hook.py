"""Applies a per-node shell file (config_node.sh): what it exports becomes the job's environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

HOOK_SECONDS = 60
SHELL_OWN = {"_", "SHLVL", "PWD", "OLDPWD", "PS1", "PS2"}  # a shell sets and unsets these itself
# The environment goes to standard output alone; whatever the file prints goes to standard error.
# No `. file || ...`: what is left of a list like that is deaf to the file's own `set -e`.
SCRIPT = "exec 3>&1 1>&2; . /dev/stdin; case $? in 0) exec env -0 >&3;; *) exit $?;; esac"


class HookError(RuntimeError):
    """The hook failed on this node."""


def run_hook(
    text: str, env: dict[str, str], workdir: str, umask: int = -1
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the hook (set, unset), with `env` on top of our environment."""
    import tempfile  # not for the probe

    before = {**os.environ, **env}
    # Files, not pipes: a process that the hook leaves running could hold a pipe open forever.
    with tempfile.TemporaryFile() as exported, tempfile.TemporaryFile() as errors:
        shell = subprocess.Popen(
            [shutil.which("bash") or "/bin/sh", "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=exported,
            stderr=errors,
            env=before,
            cwd=workdir if os.path.isdir(workdir) else None,
            start_new_session=True,
            umask=umask,
        )
        try:
            shell.communicate(text.encode("utf-8", "surrogateescape"), HOOK_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            raise HookError(f"did not end within {HOOK_SECONDS} s") from error
        for file in (exported, errors):
            file.seek(0)
        raw, message = exported.read(), errors.read().decode("utf-8", "replace").strip()[-2000:]
    if shell.returncode != 0 or not raw:
        code = shell.returncode
        left = f"ended with exit code {code}" if code else "left by `exit`"
        raise HookError(left + (f": {message}" if message else ""))
    after = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            after[os.fsdecode(name)] = os.fsdecode(value)
    changed = {k: v for k, v in after.items() if before.get(k) != v and k not in SHELL_OWN}
    return changed, [name for name in before if name not in after and name not in SHELL_OWN]
