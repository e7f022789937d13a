#!/bin/sh
# The steps by which the images are made, run from the root of the sources; each does one thing:
#
#   install.sh libraries EXTRA              Debian's libraries that the Python packages link against
#   install.sh uv                           uv, at the version that scripts/setup.sh pins
#   install.sh dependencies EXTRA VENV ...  a new environment in VENV with what EXTRA of pyproject.toml
#                                           needs, at the versions of requirements/run.txt
#   install.sh project VENV                 the wheel of these sources, into VENV
#   install.sh bytecode EXTRA VENV          byte code of what the programs import, and of nothing else:
#                                           the image is read-only, so they could not keep it themselves
#
# EXTRA: operator | worker (CPU) | worker-cuda12 | worker-cuda13. More arguments of `dependencies` are uv's.
# TORCH_BACKEND chooses where torch comes from: pypi, or a name that `uv pip install --torch-backend` knows.
set -eu

die() { echo "install.sh: $*" >&2; exit 1; }

libraries() {
    case $1 in
    operator) return ;;
    # Mooncake links against the first four; ibverbs-providers has the drivers of the RDMA cards.
    worker*) set -- libcurl4 libibverbs1 libnuma1 librdmacm1 ibverbs-providers liburing2 ;;
    *) die "no such extra: $1" ;;
    esac
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

install_uv() {
    pin=$(sed -n 's/^uv_pin=//p' scripts/setup.sh)
    [ -n "$pin" ] || die "scripts/setup.sh pins no uv"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore "$pin"
}

# torch's CPU and CUDA 12 builds need other CUDA packages than the ones that the lock has for PyPI's
# build, which is for CUDA 13. torch itself says which, to the version.
constraints() {
    case $1 in
    pypi) cat requirements/run.txt ;;
    *) grep -Ev '^(cuda-|nvidia-|triton==)' requirements/run.txt ;;
    esac
    # The builds of Mooncake are released together; the lock has the one for CPUs.
    sed -n 's/^mooncake-transfer-engine-non-cuda==/==/p' requirements/run.txt | while read -r version; do
        echo "mooncake-transfer-engine$version"
        echo "mooncake-transfer-engine-cuda13$version"
    done
}

dependencies() {
    extra=$1 venv=$2
    shift 2
    case $extra in
    operator | worker-cuda13) backend=pypi ;;
    worker) backend=cpu ;;
    worker-cuda12) backend=cu129 ;;
    *) die "no such extra: $extra" ;;
    esac
    backend=${TORCH_BACKEND:-$backend}
    uv venv --quiet --python "$(command -v python3)" "$venv"
    pins=$(mktemp)
    constraints "$backend" >"$pins"
    [ "$backend" = pypi ] || set -- --torch-backend "$backend" "$@"
    VIRTUAL_ENV=$venv uv pip install --constraint "$pins" "$@" -r pyproject.toml --extra "$extra"
    rm "$pins"
    # Mooncake's CUDA builds want CUDA's runtime where the linker finds it; torch's packages bring it.
    runtime=$(find "$venv/lib" -path '*/nvidia/*/lib/libcudart.so.*' | head -n 1)
    [ -z "$runtime" ] || ln -s "$(dirname "$runtime")" "$venv/lib/cuda"
}

project() {
    wheels=$(mktemp -d)
    uv build --quiet --wheel --build-constraints requirements/run.txt --out-dir "$wheels" .
    VIRTUAL_ENV=$1 uv pip install --no-deps "$wheels"/encodepool-*.whl
    rm -r "$wheels"
    VIRTUAL_ENV=$1 uv pip check
}

bytecode() {
    case $1 in
    operator) modules="encodepool_operator.cli.main encodepool_operator.cli.operator
        encodepool_operator.cli.cluster_view encodepool_operator.controller.run" ;;
    worker*) modules="encodepool_worker.cli.serve encodepool_worker.supervisor encodepool_worker.frontend.app
        encodepool_worker.shell.loop encodepool_worker.shell.rank encodepool_worker.towers.load
        encodepool_worker.towers.qwen3_vl encodepool_worker.towers.qwen2_5_vl" ;;
    *) die "no such extra: $1" ;;
    esac
    # shellcheck disable=SC2086 # each word is a module
    PYTHONDONTWRITEBYTECODE='' "$2/bin/python" -c '
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)' $modules
}

step=${1:-}
[ $# -eq 0 ] || shift
case $step in
libraries | dependencies | project | bytecode) "$step" "$@" ;;
uv) install_uv ;;
*) die "usage: install.sh libraries|uv|dependencies|project|bytecode ..." ;;
esac
