#!/usr/bin/env bash
# From a fresh clone to a training run on a cluster of two nodes, all on this machine. Root or not.
# Arguments are those of `orchestrator demo`: scripts/demo.sh --keep
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

need_apt sshd openssh-server
need_venv
cd -- "$ROOT"
exec .venv/bin/orchestrator demo "$@"
