#!/usr/bin/env bash
# Builds the documentation as a site in build/site: its pages open without a server, too.
# Arguments are those of mkdocs build: scripts/docs.sh --site-dir DIR
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
need_venv docs
cd -- "$ROOT"
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build "$@"
printf 'docs: open %s/build/site/index.html\n' "$ROOT"
