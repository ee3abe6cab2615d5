"""A login shell runs the user's rc files before it runs our command: what they can do to it.

One that reads standard input takes what is for our program; one that executes another shell has
that read it; one that exits leaves nothing.
"""

from __future__ import annotations

# Comes first on standard input. A shell that an rc file has put in place of the login's ends with
# it, where it would take for commands whatever comes next. Python takes it for a name. And who
# does not find it there knows that an rc file has read it.
FIRST = "exit"
FIRST_LINE = f"{FIRST}\n".encode()
TAKEN = "input-was-taken"

FILES = ".bashrc, .zshenv, .cshrc or config.fish"  # whichever its shell reads without a terminal
TRY = "try: ssh to it with the command `true`"
WAITS = f"its login shell never gets to our command: does something wait, or read, in its {FILES}?"
IF_SLOW = f"{TRY}; one that is only slow needs a longer --connect-timeout"
INPUT_TAKEN = (
    f"something in its {FILES} reads standard input, which is for our program",
    "let it read only on a terminal; in bash and zsh: [ -t 0 ] && read ...",
)
LOOK_FOR_EXIT = (
    f"{TRY}; look for `exit` and `exec` in its {FILES}, and for a command that its sshd_config"
    " (ForceCommand) or its authorized_keys (command=) puts in place of ours"
)
LONGEST = 300


def last_line(text: str) -> str:
    """Return what was said last, without the lines that led to it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-LONGEST:] if lines else ""
