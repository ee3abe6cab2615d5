"""Becomes a shell, or a program, with the environment that the ranks of a job have on this node.

`orchestrator ssh` gives this text to the node's Python, so it imports nothing of ours. The
variables come from the job's spec, which only its owner can read: none is on a command line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

OWN = ("SSH_", "TERM", "SHLVL", "PWD", "OLDPWD", "_")  # of this login


def activated(run: str, job: str, node: str) -> dict[str, str]:
    """Return what surrounds the job's processes, as an activation has set it, while they run."""
    try:
        with open(os.path.join(run, "events.jsonl"), encoding="ascii") as file:
            events = [json.loads(line) for line in file]
        pids = [event["supervisor"] for event in events if event["event"] == "started"]
        with open(f"/proc/{int(pids[0])}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if words[-4:-1] != [b"supervise", job.encode(), node.encode()]:
            return {}  # another process has its number by now
        with open(f"/proc/{int(pids[0])}/environ", "rb") as file:
            pairs = [os.fsdecode(row).partition("=") for row in file.read().split(b"\0") if row]
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # it is over, or was never begun
    return {name: value for name, _, value in pairs if not name.startswith(OWN)}


def main() -> None:
    job, node, directory, *words = sys.argv[1:]
    home = os.environ.get("ORCHESTRATOR_HOME") or os.path.expanduser("~/.orchestrator")
    path = os.path.join(home, "runs", job, node, "spec.json")
    try:
        with open(path, encoding="ascii") as file:
            spec = json.load(file)
    except FileNotFoundError:
        sys.exit(f"orchestrator: this machine knows nothing of job {job} (no {path})")
    except (OSError, ValueError) as error:
        sys.exit(f"orchestrator: the spec of the job cannot be read: {error}")
    variables = os.environ
    variables.update(activated(os.path.dirname(path), job, node))
    variables.update(spec["env"])
    # The job's Python is found first, as by the ranks: path_with.
    programs, path = os.path.dirname(spec["agent"][0]), variables.get("PATH", os.defpath)
    for name in ("python", "python3"):
        program = os.path.join(programs, name)
        if os.path.exists(program) and shutil.which(name) != program:
            variables["PATH"] = os.pathsep.join([programs, path])
    for name in spec["unset"]:
        variables.pop(name, None)
    directory = os.path.expanduser(directory or spec["workdir"])
    try:
        os.chdir(directory)
    except OSError as error:
        sys.exit(f"orchestrator: {directory}: {error.strerror}")
    variables["PWD"] = directory
    shell = variables.get("SHELL") or "/bin/sh"
    if len(words) == 1:
        words = [shell, "-c", words[0]]
    # Not a login shell: its profile would put another PATH in the place of the job's.
    words = words or [shell, "-i"]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by programs
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"orchestrator: {words[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
