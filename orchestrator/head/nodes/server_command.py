"""Builds the command that starts the node server, in its container, environment and Python.

Any login shell may parse it, so it has no character that one of them treats specially in quotes.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from orchestrator.head.nodes.environment import Environment

# The first line on standard input. A shell that an rc file started in place of the login shell
# exits on it, and so does not run the rest as commands. For Python it is a name without effect. If
# it is missing, an rc file has read it.
FIRST = "exit"
FIRST_LINE = f"{FIRST}\n".encode()
TAKEN = "input-was-taken"

# The files that a login shell reads without a terminal.
FILES = ".bashrc, .zshenv, .cshrc or config.fish"
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
# The answer to a login as root on cloud machines, which then wait for ten seconds.
ANOTHER_USER = re.compile(r"""Please login as the user "?([a-z_][\w.-]*)"? rather""")


def why_never_begins(said: str) -> tuple[str, str]:
    """Return (reason, fix) for a command that did not start in time, from the output so far."""
    begun = re.search("^python-here (.{1,500})$", said, re.MULTILINE)
    if begun:
        return f"its Python, {begun[1]}, takes too long to begin", f"{IF_SLOW}, or a local disk"
    # A program there reads and echoes the input of ours.
    echoed = FIRST in said.splitlines()
    # The end of the wait can let our own complaint come after that.
    last = "" if echoed else last_line(said.replace(TAKEN, ""))
    return another_user(said) or (f"{WAITS}{last and f' it says: {last}'}", IF_SLOW)


def another_user(said: str) -> tuple[str, str] | None:
    """Return (reason, fix) if the machine asks for another user in place of a shell, else None."""
    named = ANOTHER_USER.search(said)
    if named is None:
        return None
    return (
        f"it wants the user {named[1]} in place of this one",
        f"write {named[1]}@ before it in the node list, or User {named[1]} into your ssh_config",
    )


def last_line(text: str) -> str:
    """Return the last line of the text that is not blank, cut to LONGEST characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-LONGEST:] if lines else ""


# conda on a busy network disk takes 10 s.
ACTIVATION_SECONDS = 60

# Names are UTF-8 on all machines, independent of the locale of the login.
CHOOSE_PYTHON = (
    'c=$1; shift; for p; do case "$p" in "~/"*) p="$HOME/${p#??}";; esac; '
    'command -v "$p" >/dev/null 2>&1 || continue; echo "python-here $p"; '
    'exec "$p" -Xutf8 -c "$c"; done; echo "no-python-here"'
)
# -c puts the login's directory on sys.path, where a json.py of the user's would be found first.
# The first statement runs on any Python: an old one could not parse the rest.
READ_PROGRAM = (
    'import sys;sys.version_info<(3,9)and(sys.stdout.write("old-python "+sys.version),sys.exit(9));'
    "sys.path[:]=filter(None,sys.path);"
    'f=open(0,"rb",0,closefd=False);'
    f'f.readline(9).strip()==b"{FIRST}"or sys.exit(print("{TAKEN}"));'
    'exec(b"".join(iter(lambda:f.read(1)or exit(9),bytes(1))))'
)
# Comes before the program and has its size: reading byte by byte would take 6 ms.
READ_SIZED = "d=b''\nwhile len(d)<{size}:d+=f.read({size}-len(d))or exit(9)\nexec(d)\0"
# Runs the script from the second line of standard input, because csh takes no long words. It uses
# bash if there is one, as activation scripts are written for it.
ACTIVATED = (
    f'read -r s; [ "$s" = {FIRST} ] || {{ echo "{TAKEN}"; exit 9; }}; '
    'IFS= read -r s; s=$(printf %b "$s"); '
    "command -v bash >/dev/null 2>&1 && "
    'exec bash --noprofile --norc -c "$s" sh "$@"; exec /bin/sh -c "$s" sh "$@"'
)
WRAPPED = 'w=$(printf %b "$1"); shift; eval "exec $w \\"\\$@\\""'

# fd 3 is the output to the head and fd 4 the input from it, so that activation cannot print to or
# read from them. Names have a prefix because the user's own scripts are sourced beside them.
ACTIVATE = (
    r"""
orch_nonce=$1 orch_limit=$2 orch_kind=$3
orch_value=$(printf %b "$4") orch_program=$5
shift 5
case $orch_value in "~/"*) orch_value=$HOME/${orch_value#??};; esac
orch_here=$PWD orch_prefix=
exec 3>&1 4<&0 1>&2 0</dev/null

orch_fail() {
    trap - EXIT
    printf '\n%s\n?%s\n' "$orch_nonce" "$*" >&3
    kill "$orch_watch" 2>/dev/null
    exit 1
}

orch_activate() {
    case $orch_kind in
    venv) orch_venv ;;
    bootstrap)
        orch_names=${ORCHESTRATOR_HOME:-$HOME/.orchestrator}/environments/${orch_value:-newest}
        orch_value=$(cd -P "$orch_names" 2>/dev/null && pwd -P) ||
            orch_fail "there is no $orch_names: orchestrator bootstrap makes it"
        orch_venv ;;
    conda) orch_conda ;;
    module) orch_module ;;
    script)
        [ -f "$orch_value" ] || orch_fail "there is no file $orch_value"
        [ -r "$orch_value" ] || orch_fail "$orch_value cannot be read"
        . "$orch_value"
        case $? in
        0) ;;
        *) orch_fail "$orch_value ended with an error" ;;
        esac ;;
    esac
}

orch_venv() {
    orch_prefix=$orch_value
    [ -x "$orch_prefix/bin/python" ] ||
        orch_fail "there is no $orch_prefix/bin/python"
    VIRTUAL_ENV=$orch_prefix PATH=$orch_prefix/bin:$PATH
    export VIRTUAL_ENV PATH
    unset PYTHONHOME
}

orch_conda() {
    orch_exe=
    for orch_p in "$CONDA_EXE" "$MAMBA_EXE" "$orch_value/bin/conda" \
        "$orch_value/../../bin/conda" \
        "$(command -v conda)" "$(command -v mamba)" "$(command -v micromamba)" \
        "$HOME/miniconda3/bin/conda" "$HOME/miniforge3/bin/conda" "$HOME/mambaforge/bin/conda" \
        "$HOME/anaconda3/bin/conda" "$HOME/conda/bin/conda" \
        /opt/conda/bin/conda /opt/miniconda3/bin/conda /opt/miniforge3/bin/conda \
        /opt/anaconda3/bin/conda /usr/local/miniconda3/bin/conda /usr/local/anaconda3/bin/conda \
        "$HOME/.local/bin/micromamba" "$HOME/bin/micromamba" "$HOME/micromamba/bin/micromamba" \
        /usr/local/bin/micromamba /opt/micromamba/bin/micromamba; do
        case $orch_p in /*) [ -f "$orch_p" ] && [ -x "$orch_p" ] && orch_exe=$orch_p ;; esac
        [ "$orch_exe" ] && break
    done
    [ "$orch_exe" ] || orch_fail "there is no conda, mamba or micromamba:" \
        "set CONDA_EXE in the environment of this login"
    orch_tool=${orch_exe##*/}
    case $orch_tool in
    conda) orch_hook=$("$orch_exe" shell.posix hook) ;;
    *) orch_hook=$("$orch_exe" shell hook --shell posix) ;;
    esac || orch_fail "$orch_exe has no hook for shells"
    eval "$orch_hook"
    if ! "$orch_tool" activate "$orch_value"; then
        orch_names=
        for orch_p in $("$orch_exe" env list 2>/dev/null | while read -r a b; do
            case $a$b in [\#*]*) ;; */*) printf '%s\n' "$a" ;; esac
        done); do
            [ "$orch_p" = "$orch_value" ] && orch_fail "it cannot be activated"
            orch_names=${orch_names:+$orch_names, }$orch_p
        done
        orch_fail "there is no environment $orch_value;" \
            "there are: ${orch_names:-none}"
    fi
    orch_prefix=$CONDA_PREFIX
    [ -x "$orch_prefix/bin/python" ] ||
        orch_fail "there is no $orch_prefix/bin/python: install python in it"
}

orch_module() {
    for orch_p in "" "$MODULESHOME/init/sh" "$LMOD_PKG/init/sh" /etc/profile.d/modules.sh \
        /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /usr/share/modules/init/sh \
        /usr/share/lmod/lmod/init/sh /usr/share/Modules/init/sh /opt/modules/init/sh \
        /opt/apps/lmod/lmod/init/sh /opt/cray/pe/lmod/lmod/init/sh; do
        [ -r "$orch_p" ] && . "$orch_p"
        command -v module >/dev/null 2>&1 && break
    done
    command -v module >/dev/null 2>&1 || orch_fail "there is no command module:" \
        "set MODULESHOME in the environment of this login"
    orch_before=$LOADEDMODULES
    set -f
    IFS=', '
    set -- $orch_value
    unset IFS
    set +f
    module load "$@" || orch_fail "they cannot be loaded"
    [ "$LOADEDMODULES" = "$orch_before" ] || return 0
    for orch_p; do  # an old version of modules fails with exit code 0
        case ":$LOADEDMODULES:" in
        *":$orch_p:"* | *":$orch_p/"*) ;;
        *) orch_fail "$orch_p cannot be loaded" ;;
        esac
    done
}

(
    trap 'kill $!; exit 0' TERM
    sleep "$orch_limit" >/dev/null 2>&1 3>&- 4<&- &
    wait $!
    printf '\n%s\n?%s\n' "$orch_nonce" "it did not end within $orch_limit s" >&3
    trap '' TERM
    kill 0
) >/dev/null 2>&1 4<&- &
orch_watch=$!
trap 'orch_fail "it ended its shell with exit code $?"' EXIT
orch_activate
set +eufx
trap - EXIT
kill "$orch_watch" 2>/dev/null
wait "$orch_watch" 2>/dev/null
cd "$orch_here" 2>/dev/null
case $#$orch_prefix in
0) set -- python3 python ;;
0*) set -- "$orch_prefix/bin/python" ;;
esac
set -- "$orch_program" "$@"
unset orch_nonce orch_limit orch_kind orch_value orch_watch
unset orch_program orch_here orch_prefix orch_hook orch_exe
unset orch_tool orch_names orch_before orch_p
exec 1>&3 0<&4 3>&- 4<&-
"""
    + CHOOSE_PYTHON
)


def python_candidates(wanted: str | None) -> list[str]:
    """Return the Python asked for, else the candidates: the head's path, then the login's."""
    return [wanted] if wanted else [sys.executable, "python3", "python"]


def pythons_to_try(environment: Environment) -> list[str]:
    """Return the Pythons to try on a node, in order."""
    if environment.activate and not environment.python:
        # These are the Pythons of the activated environment.
        return ["python3", "python"]
    return python_candidates(environment.python)


def shell_command(environment: Environment, nonce: str) -> str:
    """Return the command; an answer of the nonce and `?` is the reason of a failed activation."""
    if environment.activate:
        kind, _, value = environment.activate.partition(":")
        words = ["/bin/sh", "-c", ACTIVATED, "sh", nonce]
        words += [str(ACTIVATION_SECONDS), kind, encode_text(value), READ_PROGRAM]
        words += [environment.python] if environment.python else []
    else:
        words = ["/bin/sh", "-c", CHOOSE_PYTHON, "sh", READ_PROGRAM, *pythons_to_try(environment)]
    if environment.wrap:
        words = ["/bin/sh", "-c", WRAPPED, "sh", encode_text(environment.wrap), *words]
    return "exec " + " ".join(map(quote_word, words))


def activation_seconds(environment: Environment) -> float:
    """Return the seconds that the environment may take before our program starts."""
    return ACTIVATION_SECONDS if environment.activate else 0


def preamble_bytes(environment: Environment) -> bytes:
    """Return the bytes that precede our program on standard input."""
    if not environment.activate:
        return FIRST_LINE
    return b"%b%b\n%b" % (FIRST_LINE, encode_text(ACTIVATE).encode(), FIRST_LINE)


def sized_program(program: str) -> bytes:
    """Return a program with its size in front, in the form that READ_PROGRAM reads."""
    data = program.encode()
    return READ_SIZED.format(size=len(data)).encode() + data


def encode_text(text: str) -> str:
    """Return a text without characters that a login shell interprets; printf %b decodes it."""
    data = text.encode("utf-8", "surrogateescape")
    return re.sub(rb"[^\w./:=, +-]", lambda m: b"\\0%03o" % m[0][0], data).decode("ascii")


def quote_word(word: str) -> str:
    """Quote a word for any login shell; csh takes `!` for a command of its history, even quoted."""
    return shlex.quote(word).replace("!", "'\\!'")


OF_BOOTSTRAP = "/.orchestrator/environments/"
MAKE_AGAIN = (
    "orchestrator bootstrap, typed as it was for this environment, makes it where it is missing;"
    " what is whole stays"
)


def activation_problem(activate: str, reason: str, errors: str) -> tuple[str, str]:
    """Return (reason, fix) for a failed activation, with the last lines of its shell."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Lmod prints advice after its error.
    error = max((at for at, line in enumerate(lines) if "error" in line.lower()), default=-3)
    last = " / ".join(lines[error:][:3])[-300:]
    kind, _, value = activate.partition(":")
    typed = value[:2] + shlex.quote(value[2:]) if value[:2] == "~/" else shlex.quote(value)
    by_hand = {
        "venv": f". {typed}/bin/activate",
        "conda": f"conda activate {typed}",
        "module": f"module load {value.replace(',', ' ')}",
        "script": f". {typed}",
        "bootstrap": "ls ~/.orchestrator/environments",
    }
    said = f" ({last})" if last else ""
    if kind == "venv" and OF_BOOTSTRAP in value and reason.startswith("there is no "):
        return f"{activate}: {reason}{said}", MAKE_AGAIN
    return f"{activate}: {reason}{said}", f"try in a shell there: {by_hand[kind]}"


# -- refusals --------------------------------------------------------------------------------------
# The reason why our program does not start on a node, from the output of its login shell.

TOO_OLD = "its Python {} is too old: 3.9 is needed"
ANOTHER_PYTHON = "name one with python=/path after the node in the list, or --python /path"


def no_server_reason(noise: bytes, errors: str, environment: Environment) -> tuple[str, str]:
    output = last_line(errors or noise.decode(errors="replace"))
    if b"no-python-here" in noise:
        return no_python(pythons_to_try(environment))
    another = another_user(noise.decode(errors="replace"))
    if another:
        return another
    old = re.search(rb"old-python ([0-9.]{1,20})", noise)
    if old:
        return TOO_OLD.format(old[1].decode()), ANOTHER_PYTHON
    # Only a whole line counts: a shell that cannot parse our command may print the command.
    lines = (noise.decode(errors="replace") + "\n" + errors).splitlines()
    taken = TAKEN in map(str.strip, lines)
    if taken and not environment.wrap:
        return INPUT_TAKEN
    python = re.search(rb"^python-here (.{1,500})$", noise, re.MULTILINE)
    if python and not taken:
        return no_sound_python(python[1].decode(errors="replace"), errors or output)
    if output.startswith("srun: "):
        return f"Slurm starts no step there: {output}", "look at: squeue, scontrol show node"
    said = f": {output}" if output and not taken else ""
    if environment.wrap:
        return (
            f"`{environment.wrap}` ends before our program starts{said}",
            f"try there: {environment.wrap} /bin/sh -c 'cat' </etc/hostname  (docker exec needs -i"
            " and no -t)",
        )
    return (
        f"its login shell ends before our program starts{said}",
        LOOK_FOR_EXIT,
    )


def no_sound_python(path: str, output: str) -> tuple[str, str]:
    # Only Python 2 lacks the option.
    if "Unknown option: -X" in output:
        return TOO_OLD.format(path), ANOTHER_PYTHON
    lines = [line for line in output.splitlines() if not line.startswith("python-here ")]
    # If Python fails to start, its message has the location after the error.
    last = last_line("\n".join([line for line in lines if "Error" in line] or lines))
    said = f": {last}" if last else ""
    return f"its Python, {path}, ends before our program starts{said}", (
        f"try there: {path} -c 'import json, selectors'; if that works, look for PYTHONHOME and"
        " PYTHONPATH in its rc files; if not, name another with python= after the node in the list,"
        " or --python"
    )


def no_python(pythons: Sequence[str]) -> tuple[str, str]:
    if len(pythons) == 1:
        return (
            f"there is no {pythons[0]} that can be executed",
            "correct --python, or the node's python= in the list",
        )
    return (
        f"there is no Python: neither {', '.join(pythons[:-1])} nor {pythons[-1]}",
        ANOTHER_PYTHON,
    )
