#!/usr/bin/env bash
# Writes the pages and manifests that are made from tables in the code; with --check says which
# ones are out of date instead.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
check=${1:-}

page() { # FILE COMMAND...: the command prints the file
    local file=$1 made
    shift
    made=$("$@")
    if [ "$check" != --check ]; then printf '%s\n' "$made" >"$file"
    elif [ "$made" != "$(cat "$file")" ]; then
        echo "$file is out of date; run: make generate" >&2
        exit 1
    fi
}

page docs/settings.md $python -m encodepool_worker.settings
page docs/metrics.md $python -m encodepool_worker.metrics
page docs/runbooks/README.md $python -c 'from encodepool_operator.core.reasons import index; print(index())'
$python docs/draw_states.py $check
$python -m encodepool_operator.api.schema $check
$python charts/encodepool/generate.py $check
