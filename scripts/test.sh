#!/usr/bin/env bash
# Sets up what the tests need and runs them on all cores; arguments are pytest's:
#
#   scripts/test.sh -k follow       everything, on real clusters
#   scripts/test.sh --fast ...      what needs no cluster, no browser and little time
#   scripts/test.sh --load 10 ...   beside ten processes that only compute; the first argument
#
# As root the hosts are network namespaces, as anyone else they are loopback addresses.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

load=0
if [ "${1:-}" = --load ]; then
    load=${2:?how many processes shall compute beside the tests?}
    shift 2
fi
gear=()
if [ "${1:-}" = --fast ]; then
    gear=(-m "not slow and not cluster and not browser")
    shift
fi
need_apt ssh openssh-client
need_venv test
if [ "${#gear[@]}" -eq 0 ]; then
    need_apt sshd openssh-server
    need_apt ip iproute2
    need_apt nft nftables
    need_apt munged munge
    need_apt slurmctld slurm-wlm
    need_apt chromium chromium || true # where it has another name, tests of pages are skipped
    say "style and types"
    "$ROOT/scripts/lint.sh"
fi

cd -- "$ROOT"
export OMP_NUM_THREADS=1
# Some containers set it, and each worker then rewrites all asserts again, which takes 5 s.
unset PYTHONDONTWRITEBYTECODE
say "tests"
# Some tests wait: one worker more than cores. Each imports torch, 3 s of a core, so twelve at most.
# One that is out of tests takes half of what another still has. Of two -n the last one counts: -n 0
# runs them in this process, as --pdb and -s want it.
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1)) # nproc would count that instead
if [ "${#gear[@]}" -eq 0 ]; then
    # Tests on clusters wait for more than half of their time.
    workers=$((2 * workers - 1))
    # On loopback addresses all hosts are this one, and emergency_stop ends what others test there.
    [ "$(id -u)" -eq 0 ] || workers=1
fi
if [ "$load" -gt 0 ]; then
    for ((number = 0; number < load; number++)); do
        # They end with this shell, also where it is killed.
        (while kill -0 "$$" 2>/dev/null; do for ((i = 0; i < 100000; i++)); do :; done; done) &
    done
fi
exec .venv/bin/pytest -n "$((workers < 12 ? workers : 12))" --dist worksteal "${gear[@]}" "$@"
