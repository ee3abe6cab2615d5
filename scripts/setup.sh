# Sourced by demo.sh and test.sh: what this repository needs on a machine, made once.
#
#   need_venv [EXTRAS]            .venv with torch and this package, such as: need_venv test
#   need_apt PROGRAM PACKAGE...   PROGRAM, installed with apt-get where we are root
#
# Both say what they do, do nothing where nothing is missing (0.1 s), and return 3 with a sentence
# on what to ask for where they cannot help.
# shellcheck shell=bash

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# An exact version: its wheel runs on CPUs, while an open range fetches gigabytes of CUDA. An
# installed torch, for GPUs for example, is kept as it is.
TORCH=${TORCH:-torch==2.13.0}

say() { printf 'setup: %s\n' "$*"; }
complain() { printf 'setup: %s\n' "$*" >&2; }

need_venv() {
    local extras=${1:-} python=$ROOT/.venv/bin/python
    [ -x "$python" ] || make_venv || return
    # Missing if the creation was interrupted, or if another tool created the environment.
    has_module "$python" pip || "$python" -m ensurepip >/dev/null || return
    local wanted=()
    if ! has_module "$python" torch; then
        say "installing $TORCH, the largest part of it all"
        wanted+=("$TORCH")
    fi
    # torch's collectives of objects, and so its checkpoints, need it.
    has_module "$python" numpy || wanted+=(numpy)
    # Editable: only other dependencies or another place of the clone need it done again.
    local stamp=$ROOT/.venv/installed${extras:+-$extras} state
    state="$ROOT $(cksum <"$ROOT/pyproject.toml")"
    if [ ! -x "$ROOT/.venv/bin/orchestrator" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        say "installing this package${extras:+ with [$extras]}"
        wanted+=(-e ".${extras:+[$extras]}")
    fi
    # All of it at once: pip looks once at what goes together.
    if [ "${#wanted[@]}" -gt 0 ]; then
        (cd -- "$ROOT" && install "${wanted[@]}") || return
        printf '%s\n' "$state" >"$stamp"
    fi
    # Where Python writes no bytecode, as in many containers, each command would compile all that it
    # imports.
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || "$python" -m compileall -q "$ROOT/orchestrator"
}

make_venv() {
    local python option=
    python=$(find_python) || {
        complain "Python 3.10 or newer is needed; as root: apt-get install python3 python3-venv"
        return 3
    }
    has_module "$python" ensurepip || apt_install python3-venv || return
    # In a container with torch in its own Python, that one is used.
    if has_module "$python" torch; then option=--system-site-packages; fi
    say "making $ROOT/.venv with $python"
    "$python" -m venv $option "$ROOT/.venv"
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

has_module() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$2"
}

install() {
    local quiet=--quiet
    if [ -t 1 ]; then quiet=; fi # a progress bar for who waits
    "$ROOT/.venv/bin/python" -m pip install --disable-pip-version-check $quiet "$@" && return
    complain "pip could not install $*; its reason is above"
    return 3
}

need_apt() {
    local program=$1
    shift
    (PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin && command -v "$program") >/dev/null ||
        apt_install "$@"
}

apt_install() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        complain "missing here: $*; ask whoever is root for: apt-get install $*"
        return 3
    fi
    say "installing $* with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    # The usual reason in a container: no package lists yet.
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null && return
    complain "apt-get could not install $*; its reason is above"
    return 3
}
