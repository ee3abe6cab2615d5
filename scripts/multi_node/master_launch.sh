#!/usr/bin/env bash
# Starts a job from this repository on every node of node_ip_list.txt. Takes the arguments of
# master_launch; reads CONFIG_FILE, MASTER_PORT and NPROC_PER_NODE from the environment.
#
#   scripts/multi_node/master_launch.sh                       the built-in training run
#   CONFIG_FILE=config/my.yaml MASTER_PORT=29600 scripts/multi_node/master_launch.sh
#   scripts/multi_node/master_launch.sh train.py --epochs 3   your own script, in the repository
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cd -- "$here/../.." # every path is relative to the top of the repository

launch=master_launch
if [ -x .venv/bin/master_launch ]; then launch=.venv/bin/master_launch; fi
if ! command -v "$launch" >/dev/null; then
    echo "master_launch is not installed; type: pip install -e '$PWD'" >&2
    exit 3
fi
exec "$launch" --hook "$here/config_node.sh" "$@"
