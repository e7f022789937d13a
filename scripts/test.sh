#!/usr/bin/env bash
# Runs the tests: `scripts/test.sh fast` the pure and contract layers, `scripts/test.sh all` everything.
# Both hold branch coverage of the two cores and of the wire at 95 %.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
pure=(tests/operator/api tests/operator/core tests/worker/core tests/worker/wire tests/test_*.py)
case ${1:?usage: scripts/test.sh fast|all} in
fast) paths=("${pure[@]}") ;;
all) paths=(tests) ;;
*) echo "usage: scripts/test.sh fast|all" >&2; exit 2 ;;
esac
if [ "$1" = all ]; then
    # Without Go the cluster's programs cannot be built: its tests then say that they are skipped,
    # and fail where CI=true asks for them.
    if command -v go >/dev/null; then $python -m tests.cluster.kit build --also helm --also kubectl
    else echo "no Go found: the tests on a real cluster are skipped" >&2
    fi
fi
$python -m pytest --cov=encodepool_operator.core --cov=encodepool_worker.core --cov=encodepool_worker.wire \
    --cov-branch --cov-report= --cov-fail-under=0 --durations=15 "${paths[@]}"
$python -m coverage report --skip-covered --sort=cover --fail-under=95
