#!/usr/bin/env bash
# Runs the tests: `scripts/test.sh fast` the pure and contract layers, `scripts/test.sh all` everything.
# Both hold branch coverage of the two cores and of the wire at 95 %.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
pure=(tests/operator/api tests/operator/core tests/worker/core tests/worker/wire tests/test_*.py)

covered() {
    $python -m pytest --cov=encodepool_operator.core --cov=encodepool_worker.core --cov=encodepool_worker.wire \
        --cov-branch --cov-report= --cov-fail-under=0 --durations=15 "$@"
    $python -m coverage report --skip-covered --sort=cover --fail-under=95
}

case ${1:?usage: scripts/test.sh fast|all} in
fast) covered "${pure[@]}"; exit ;;
all) ;;
*) echo "usage: scripts/test.sh fast|all" >&2; exit 2 ;;
esac

# Without Go the cluster's programs cannot be built: its tests then say that they are skipped,
# and fail where CI=true asks for them.
if command -v go >/dev/null; then $python -m tests.cluster.kit build --also helm --also kubectl
else echo "no Go found: the tests on a real cluster are skipped" >&2
fi
# These mostly wait for the cluster, so they run beside the others.
log=$(mktemp)
# With job control, for without it the shell has what runs in the background ignore SIGINT, and tests send it.
set -m
$python -m pytest --durations=15 tests/cluster >"$log" 2>&1 &
cluster=$!
set +m
trap 'kill $cluster 2>/dev/null || true; rm -f "$log"' EXIT
echo "the tests on a real cluster run beside these; what they print follows at the end"
failed=0
covered --ignore=tests/cluster tests || failed=$?
wait $cluster || failed=$?
cat "$log"
exit $failed
