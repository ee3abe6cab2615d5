#!/usr/bin/env bash
# Runs the tests that depend on Python and torch with other versions than .venv has.
#
#   scripts/versions.sh PYTHON TORCH [PYTEST-ARGS]
#   scripts/versions.sh python3.12 torch==2.8.0      # the oldest torch that is supported
#   scripts/versions.sh python3.13 torch             # the newest
#
# PYTHON is a program; TORCH is what pip is asked for, several gigabytes where it is built for CUDA.
# The environment and a clone of what is committed lie in a temporary directory, and go at the end.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
python=$1 torch=$2
shift 2
[ $# -gt 0 ] || set -- tests/engine tests/node tests/launchers tests/local_cluster tests/api tests/cli
place=$(mktemp -d "${TMPDIR:-/tmp}/versions.XXXXXX")
trap 'rm -rf -- "$place"' EXIT
trap 'exit 130' INT TERM
git clone --quiet "$(dirname -- "${BASH_SOURCE[0]}")/.." "$place/clone"
"$python" -m venv "$place/clone/.venv"
cd -- "$place/clone"
.venv/bin/python -m pip install --quiet "$torch" -e ".[test]"
.venv/bin/python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE
.venv/bin/python -m pytest -q -n "$(($(env -u OMP_NUM_THREADS nproc) + 1))" --dist worksteal "$@"
