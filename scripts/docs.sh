#!/usr/bin/env bash
# Builds the documentation as a site in build/site.
# Arguments are those of mkdocs build: scripts/docs.sh --site-dir DIR
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
need_venv docs
cd -- "$ROOT"
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build "$@"
printf 'docs: to read it: python3 -m http.server --bind 127.0.0.1 --directory %q\n' "$ROOT/build/site"
