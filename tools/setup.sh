#!/bin/sh
# Set-up: see what a job of the Makefile needs on Debian 12, and install what is missing.
# Usage: tools/setup.sh run|test|torch|lint|fuzz|venv ...
#
# Called before each job and quiet when there is nothing to do, so it keeps no stamp that could lie.
# It never removes or upgrades anything, and never asks a question.
set -eu

run_packages="gcc make libc6-dev libczmq-dev libzmq3-dev libopenblas-dev libjansson-dev libinih-dev
    libisal-dev libxxhash-dev libgif-dev libmicrohttpd-dev supervisor python3 util-linux"
test_packages="libcriterion-dev python3-pytest python3-pytest-xdist python3-zmq python3-numpy
    python3-venv man-db pkg-config"
# For gradq.torch and its examples: 170 MB of archives, 850 MB on the disk, two minutes.
torch_packages="python3-torch python3-sklearn python3-zmq python3-numpy python3-venv"
# By version: what clang-format calls clean changes from one release to the next.
lint_packages="clang-format-14 clang-tidy-14 cppcheck"
fuzz_packages="clang-14 libclang-rt-14-dev"

venv=build/venv
# Gymnasium is in no Debian release; safetensors is the Python reader that ours is held against.
# NumPy 2: NumPy 1's vectorised sine differs from libm's in the last bit, and so would trajectories.
# TensorBoard writes and reads the curves of a run, matplotlib draws them.
venv_packages="gymnasium ale-py safetensors numpy>=2 tensorboard matplotlib"

missing () {
    for package in "$@"; do
        case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
        *" installed") ;;
        *) printf ' %s' "$package" ;;
        esac
    done
}

install_packages () {
    if ! command -v dpkg-query >/dev/null; then
        echo "setup: not a Debian system; going on, and hoping for the equivalents of: $*" >&2
        return
    fi
    wanted=$(missing "$@")
    [ -n "$wanted" ] || return 0

    as_root=
    if [ "$(id -u)" != 0 ]; then
        as_root=sudo
        if ! sudo -n true 2>/dev/null; then
            echo "setup: packages are missing, and installing them needs root.  Please type:" >&2
            echo "    sudo apt-get update && sudo apt-get install$wanted" >&2
            exit 1
        fi
    fi
    echo "setup: installing$wanted" >&2
    # A fresh machine may be installing something itself: wait for its lock.
    options="-q -y --no-install-recommends -o DPkg::Lock::Timeout=300"
    log=$(mktemp)
    # shellcheck disable=SC2086  # lists of words on purpose
    if ! { $as_root apt-get -q update </dev/null &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install $options $wanted </dev/null
    } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "setup: apt-get failed (above are its last lines; all of it is in $log)" >&2
        exit 1
    fi
    rm -f "$log"
}

# Python for gym:ID, for curves, and for the tests that read our files with other people's code.
make_venv () {
    if "$venv/bin/python" -c 'import gymnasium, ale_py, safetensors, numpy, tensorboard, matplotlib
assert numpy.__version__ >= "2"' 2>/dev/null; then
        return 0
    fi
    echo "setup: installing $venv_packages into $venv" >&2
    mkdir -p build
    # shellcheck disable=SC2086
    if /usr/bin/python3 -m venv --clear "$venv" &&
        "$venv/bin/python" -m pip install -q --retries 2 $venv_packages </dev/null; then
        return 0
    fi
    if [ "${CI:-}" = true ]; then
        echo "setup: $venv is incomplete, and with CI=true nothing may be skipped" >&2
        exit 1
    fi
    echo "setup: going on without $venv; tests that need its packages will be skipped" >&2
}

# Prometheus' checker of metrics, out of Debian's package (19 MB), which is not installed: that
# would start a server.
make_promtool () {
    if [ -x build/promtool ] || command -v promtool >/dev/null ||
        ! command -v apt-get >/dev/null; then
        return 0
    fi
    echo "setup: unpacking promtool into build/" >&2
    mkdir -p build
    place=$(mktemp -d)
    # The lists of packages may be missing; only root may fetch them.
    if (cd "$place" && { apt-get -q download prometheus >log 2>&1 </dev/null ||
        { apt-get -q update && apt-get -q download prometheus; } >>log 2>&1 </dev/null; } &&
        dpkg-deb -x prometheus_*.deb . && chmod 755 usr/bin/promtool) &&
        mv "$place/usr/bin/promtool" build/promtool; then
        rm -rf "$place"
        return 0
    fi
    tail -n 3 "$place/log" >&2
    rm -rf "$place"
    if [ "${CI:-}" = true ]; then
        echo "setup: there is no promtool, and with CI=true nothing may be skipped" >&2
        exit 1
    fi
    echo "setup: going on without promtool; tests that need it will be skipped" >&2
}

# Gymnasium beside Debian's torch, which wants Debian's NumPy.
make_torch_venv () {
    if build/venv-torch/bin/python -c 'import gymnasium' 2>/dev/null; then
        return 0
    fi
    echo "setup: installing gymnasium into build/venv-torch" >&2
    mkdir -p build
    if /usr/bin/python3 -m venv --clear --system-site-packages build/venv-torch &&
        build/venv-torch/bin/python -m pip install -q --retries 2 gymnasium </dev/null; then
        return 0
    fi
    if [ "${CI:-}" = true ]; then
        echo "setup: build/venv-torch is incomplete, and with CI=true nothing may be skipped" >&2
        exit 1
    fi
    echo "setup: going on without build/venv-torch; tests that need it will be skipped" >&2
}

cd "$(dirname "$0")/.."
packages=
with_venv=
with_promtool=
with_torch=
for job in "$@"; do
    case $job in
    run) packages="$packages $run_packages" ;;
    test) packages="$packages $run_packages $test_packages" with_venv=yes with_promtool=yes ;;
    torch) packages="$packages $torch_packages" with_torch=yes ;;
    lint) packages="$packages $lint_packages" ;;
    fuzz) packages="$packages $run_packages $fuzz_packages" ;;
    venv) packages="$packages python3-venv" with_venv=yes ;;
    *)
        echo "setup: '$job' is none of run, test, torch, lint, fuzz, venv" >&2
        exit 2
        ;;
    esac
done
# shellcheck disable=SC2086
install_packages $packages
if [ -n "$with_venv" ]; then make_venv; fi
if [ -n "$with_promtool" ]; then make_promtool; fi
if [ -n "$with_torch" ]; then make_torch_venv; fi
