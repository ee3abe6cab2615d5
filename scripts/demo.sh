#!/usr/bin/env bash
# Goes from a fresh clone to a training run on two nodes, both on this machine, as root or not.
# Takes the arguments of `orchestrator demo`: scripts/demo.sh --keep
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

need_apt sshd openssh-server
need_venv views
cd -- "$ROOT"
exec .venv/bin/orchestrator demo "$@"
