#!/usr/bin/env bash
# Makes a Python 3.12 environment in which tests run other people's gyms, and prints its folder: setup_gyms.sh [gyms|verifiers],
# by the lock of that name in tests/locks; gyms: NeMo Gym and OpenEnv. It is up to 1 GB, so it lies in the user's cache, once for
# every content of the lock. OMNIFLEET_PYTHON312 names the Python to use, OMNIFLEET_CACHE the cache.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:-gyms}
lock=tests/locks/$name.lock
cache=${OMNIFLEET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/omnifleet}
venv=$cache/$name-$(sha256sum "$lock" scripts/setup_gyms.sh | sha256sum | cut -c-16)
log=$venv.log
uv=.venv/bin/uv

fail() {
    echo "no environment for $lock: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${OMNIFLEET_PYTHON312:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "Python 3.12 not found; install it (apt-get install python3.12 python3.12-venv, or: pyenv install 3.12) or set OMNIFLEET_PYTHON312=/path/to/python3.12"
}

if [ ! -e "$venv/ready" ]; then
    mkdir -p "$cache"
    exec 9>"$venv.lock"
    flock 9 # one set-up at a time; who waited may find it done
fi
if [ ! -e "$venv/ready" ]; then
    started=$SECONDS
    unset PIP_CONSTRAINT PIP_REQUIREMENT PYTHONPATH VIRTUAL_ENV
    python=$(find_python)
    printf '[test tools] %s … ' "$venv" >&2
    mirror=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
    [ -z "$mirror" ] || export UV_DEFAULT_INDEX=$mirror
    rm -rf "$venv"
    "$python" -m venv "$venv" >"$log" 2>&1 || fail "$python cannot make one ($log)"
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r "$lock" >>"$log" 2>&1 \
        || "$venv/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock" >>"$log" 2>&1 \
        || fail "$(tail -n 1 "$log" | cut -c-300) ($log)"
    touch "$venv/ready"
    printf '%d s\n' $((SECONDS - started)) >&2
fi
echo "$venv"
