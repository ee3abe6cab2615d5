#!/usr/bin/env bash
# Style and types, of everything; nothing is changed.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
need_venv test
cd -- "$ROOT"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
