#!/usr/bin/env bash
# Sets up what the tests need and runs them all: ./scripts/test.sh [pytest options].
# As root the hosts are network namespaces; as anyone else they are loopback addresses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

need_apt sshd openssh-server openssh-client
need_apt ip iproute2
need_venv train,test

export OMP_NUM_THREADS=1
echo "== style and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
echo "== tests"
exec .venv/bin/pytest "$@"
