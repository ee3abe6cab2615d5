"""Shells in namespaces of their own, which do what they are told and live as long as their pipe."""

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

# Does what it reads, line by line, and answers each line. As process 1 it also reaps orphans.
SHELL = 'while read -r line; do eval "$line" && echo ok || echo failed; done'
SWITCH = ["unshare", "--net", "bash", "-c", SHELL]
SPACES = ["--net", "--mount", "--uts", "--ipc", "--pid"]
HOST = ["unshare", *SPACES, "--mount-proc", "--fork", "--kill-child", "bash", "-c", SHELL]


def python_first() -> str:
    return f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def shell(argv: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start one of the two above; Ctrl-C in the terminal is not for it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as said:
        return subprocess.Popen(
            argv,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )


def answers(shells: Sequence[subprocess.Popen[str]], lines: Sequence[str]) -> None:
    for one, line in zip(shells, lines, strict=True):
        assert one.stdin is not None
        one.stdin.write(line + "\n")
    for one, line in zip(shells, lines, strict=True):
        assert one.stdout is not None
        answer = one.stdout.readline()
        assert answer == "ok\n", f"{line}: {answer or 'the shell ended'}"


def only_child(pid: int) -> int:
    """Process 1 of a host, as this process numbers it; `pid` is the unshare that waits for it."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def inside(pid: int, argv: Sequence[str], said: str = "") -> None:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", *argv],
        input=said,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"


def cover(place: str, new: str, kept: Iterable[Path]) -> list[str]:
    """Mount `new` at `place`, and let what hosts need below it shine through."""
    below = [str(p) for p in kept if place in map(str, p.parents)]
    steps = [f"exec {{keep{n}}}< {shlex.quote(path)}" for n, path in enumerate(below)]
    steps.append(f"mount {new} {shlex.quote(place)}")
    for n, path in enumerate(below):
        # Not canonicalized: the name that the descriptor had is hidden by now.
        steps.append(f"mkdir -p {shlex.quote(path)}")
        steps.append(f"mount --no-canonicalize --bind /proc/self/fd/$keep{n} {shlex.quote(path)}")
        steps.append(f"exec {{keep{n}}}<&-")
    return steps
