#!/usr/bin/env bash
# Sets up what the tests need and runs them all; arguments are pytest's: scripts/test.sh -k follow
# As root the hosts are network namespaces, as anyone else they are loopback addresses.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

need_apt sshd openssh-server
need_apt ssh openssh-client
need_apt ip iproute2
need_apt nft nftables
need_apt munged munge
need_apt slurmctld slurm-wlm
need_venv test
cd -- "$ROOT"

export OMP_NUM_THREADS=1
say "style and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
say "tests"
exec .venv/bin/pytest "$@"
