#!/usr/bin/env bash
# Runs the tests: `scripts/test.sh fast` the pure layers, `changed` everything but the groups of
# tests/seldom.py whose files have not changed, `all` everything. tests/README.md says more.
set -euo pipefail
cd "$(dirname "$0")/.."
python=(.venv/bin/python)
pure=(tests/operator/api tests/operator/core tests/worker/core tests/worker/wire tests/test_*.py)

# Branch coverage of the two cores and of the wire, by their pure tests alone, is held at 95 %.
covered() {
    local failed=0
    "${python[@]}" -m pytest --cov=encodepool_operator.core --cov=encodepool_worker.core --cov=encodepool_worker.wire \
        --cov-branch --cov-report= --cov-fail-under=0 --durations=10 "${pure[@]}" || failed=1
    "${python[@]}" -m coverage report --skip-covered --sort=cover --fail-under=95 || failed=1
    return $failed
}

case ${1:?usage: scripts/test.sh fast|changed|all} in
fast) covered; exit ;;
changed | all) seldom=--seldom=$1 ;;
*) echo "usage: scripts/test.sh fast|changed|all" >&2; exit 2 ;;
esac

# Without Go the cluster's programs cannot be built: its tests then say that they are skipped,
# and fail where CI=true asks for them.
if command -v go >/dev/null; then "${python[@]}" -m tests.cluster.kit build
else echo "no Go found: the tests on a real cluster are skipped" >&2
fi

# Lanes run side by side: tests on clusters and end to end mostly wait, the others take what is left.
logs=$(mktemp -d)
lanes=(nodes plane e2e parts pure)
declare -A pids
trap 'kill -INT -- "${pids[@]/#/-}" 2>/dev/null || true; rm -rf "$logs"' EXIT

# Tests that look at all of /dev/shm must not see what another lane puts there.
own_shm=()
if [ "$(id -u)" = 0 ] && unshare -m true 2>/dev/null; then
    own_shm=(unshare -m sh -c 'mount -t tmpfs -o mode=1777 none /dev/shm && exec "$@"' sh)
fi

pytest() { "${python[@]}" -m pytest "$seldom" --durations=10 "$@"; }
lane_nodes() { pytest --ignore-glob='*/test_operator_*.py' tests/cluster; }
lane_plane() { pytest tests/cluster/test_operator_*.py; } # on a control plane without nodes
lane_e2e() { pytest tests/e2e; }
lane_parts() {
    renice -n 10 $BASHPID >/dev/null
    local python=("${own_shm[@]}" "${python[@]}")
    pytest --ignore=tests/cluster --ignore=tests/e2e "${pure[@]/#/--ignore=}" tests
}
lane_pure() {
    renice -n 10 $BASHPID >/dev/null
    covered
}
timed() { # LANE: its time as the last line of its log
    local code=0 start=$SECONDS
    "lane_$1" || code=$?
    printf 'lane %-8s %2d min %02d s   %s\n' "$1" $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60)) \
        "$([ $code = 0 ] && echo passed || echo FAILED)"
    exit $code
}
progress() { # the last percentage that each lane has printed
    for lane in "${lanes[@]}"; do
        printf '%s %s   ' "$lane" "$(grep -oE '[0-9]+%' "$logs/$lane" | tail -n 1)"
    done
}

# With job control, for without it the shell has what runs in the background ignore SIGINT, and tests send it.
set -m
for lane in "${lanes[@]}"; do
    ENCODEPOOL_TEST_LANE=$lane timed "$lane" >"$logs/$lane" 2>&1 &
    pids[$lane]=$!
done
set +m
failed=0
for lane in "${lanes[@]}"; do
    while kill -0 "${pids[$lane]}" 2>/dev/null; do
        sleep 1
        [ $((SECONDS % 60)) != 0 ] || echo "tests: $((SECONDS / 60)) min: $(progress)"
    done
    wait "${pids[$lane]}" || failed=1
    cat "$logs/$lane"
done
echo
echo "the ten slowest tests:"
grep -hE '^[0-9.]+s (call|setup|teardown) ' "$logs"/* | sort -rn | head -n 10 || true
grep -h '^lane ' "$logs"/*
exit $failed
