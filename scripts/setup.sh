#!/usr/bin/env bash
# Sets up .venv at the root of the checkout: `scripts/setup.sh run` for the operator and the worker,
# `scripts/setup.sh dev` for the tests too. Repeats nothing that is in place already.
set -euo pipefail
cd "$(dirname "$0")/.."
want=${1:?usage: scripts/setup.sh run|dev}
say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# uv's version is pinned here; everything else in requirements/.
uv_pin=uv==0.13.9

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "need root or sudo for: $*"
    fi
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "no $python found; install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$python is $("$python" -V 2>&1); Python 3.11 or newer is needed (set PYTHON to another one)"

# Mooncake's wheel links against these; a distribution without dpkg brings them under its own names.
packages=()
if command -v dpkg-query >/dev/null; then
    for package in libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || packages+=("$package")
    done
    "$python" -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
fi
if [ ${#packages[@]} -gt 0 ]; then
    say "installing system packages: ${packages[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

files=(pyproject.toml requirements/run.txt)
[ "$want" = dev ] && files=(pyproject.toml requirements/dev.txt requirements/peers.txt)
stamp=.venv/.ready-$want
state=$( (pwd; "$python" -V; cat "${files[@]}") | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

if [ ! -x .venv/bin/python ]; then
    say "creating .venv with $("$python" -V)"
    "$python" -m venv .venv
fi
if ! .venv/bin/uv --version 2>/dev/null | grep -q " ${uv_pin#uv==}"; then
    # An environment made by another tool may lack pip.
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$uv_pin"
fi
export UV_LINK_MODE=${UV_LINK_MODE:-hardlink} VIRTUAL_ENV=$PWD/.venv
# Where Python may not keep its byte code, every process would compile torch again: seconds each time.
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export UV_COMPILE_BYTECODE=1
say "installing the dependencies pinned in ${files[*]:1} (torch is large: minutes the first time, seconds after)"
if [ "$want" = dev ]; then
    .venv/bin/uv pip install --quiet -r requirements/dev.txt
    # TokenSpeed asks for CUDA-only packages that its transfer code never calls: hence --no-deps.
    .venv/bin/uv pip install --quiet --no-deps -r requirements/peers.txt
else
    .venv/bin/uv pip install --quiet -r requirements/run.txt
fi
.venv/bin/uv pip install --quiet --no-deps --editable .
printf '%s\n' "$state" >"$stamp"
# The larger set contains the smaller one.
[ "$want" = dev ] && (pwd; "$python" -V; cat pyproject.toml requirements/run.txt) | sha256sum >.venv/.ready-run
say "ready: .venv ($want)"
