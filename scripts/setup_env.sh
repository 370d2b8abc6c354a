#!/usr/bin/env bash
# Makes the one environment that runs everything here on a CPU: setup_env.sh [VENV], default .venv.
# Does nothing if VENV is up to date. OMNIFLEET_TORCH_INDEX names an extra package index with CPU builds of torch;
# OMNIFLEET_PYTHON the Python 3.11 to use.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$(realpath -m "${1:-.venv}")
python=$venv/bin/python
stamp=$venv/omnifleet-stamp
log=$venv/setup.log
steps=5
step=0

fail() {
    printf '\nset-up failed: %s\n' "$1" >&2
    exit 1
}

# begin TEXT: a progress line, closed by `done_` with the seconds it took.
begin() {
    step=$((step + 1))
    step_started=$SECONDS
    printf '[%d/%d] %s … ' "$step" "$steps" "$1"
}

done_() {
    printf '%d s\n' $((SECONDS - step_started))
}

quietly() {
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        printf '\n' >&2
        tail -n 20 "$log" >&2
        fail "$(basename "$1") ${*:2:3} … (whole log: $log)"
    fi
}

find_python() {
    local candidate is_311='import sys; sys.exit(sys.version_info[:2] != (3, 11))'
    for candidate in "${OMNIFLEET_PYTHON:-}" python3.11 "$HOME"/.pyenv/versions/3.11*/bin/python3.11 python3; do
        # What an activated environment was made from: it may be the one that is about to be made anew.
        if [ -n "$candidate" ] && "$candidate" -c "$is_311" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    fail "Python 3.11 not found; install it (apt-get install python3.11 python3.11-venv, or: pyenv install 3.11) or set OMNIFLEET_PYTHON=/path/to/python3.11"
}

fingerprint() {
    {
        pwd
        sha256sum requirements/* pyproject.toml services/*/pyproject.toml lib/*/pyproject.toml scripts/setup_env.sh scripts/site/*.py
    } | sha256sum | cut -d' ' -f1
}

# packages ARGS: uv where it works (10 s for 200 packages), else pip (much slower, but it reads every pip setting).
packages() {
    if "$venv/bin/uv" pip install --quiet --python "$python" "$@" >>"$log" 2>&1 </dev/null; then
        return
    fi
    echo "uv could not install; trying pip" >>"$log"
    quietly "$python" -m pip install --quiet "$@"
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the CPU environment is for Linux on x86_64; this is $(uname -sm)"
want=$(fingerprint)
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0
[ ! -e "$venv" ] || [ -f "$venv/pyvenv.cfg" ] || fail "$venv exists and is not a Python environment"
exec 9>"$venv.lock"
flock 9 # one set-up at a time; who waited may find it done
[ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0

export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_CONSTRAINT PIP_REQUIREMENT PYTHONPATH VIRTUAL_ENV
started=$SECONDS
echo "Setting up $venv (about 2.7 GB; a minute or two)"

begin "Python 3.11 environment"
base=$(find_python)
rm -rf "$venv"
mkdir -p "$venv"
quietly "$base" -m venv "$venv"
quietly "$python" -m pip install --quiet -r requirements/bootstrap.txt
ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || quietly scripts/apt_install.sh libnuma1
done_

begin "torch"
index=()
[ -z "${OMNIFLEET_TORCH_INDEX:-}" ] || index=(--extra-index-url "$OMNIFLEET_TORCH_INDEX")
quietly "$python" -m pip install --quiet "${index[@]}" --no-deps -r requirements/torch.txt
done_

begin "$(grep -c '^[a-z].*==' requirements/cpu.lock) locked packages: vLLM, transformers, AutoModel, Ray, tools"
mirror=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
[ -z "$mirror" ] || export UV_DEFAULT_INDEX=$mirror
packages --no-deps --require-hashes -r requirements/cpu.lock
# What the build of torch needs beyond the lock: nothing for a CPU build, NVIDIA's libraries for PyPI's.
quietly "$python" -m pip install --quiet "${index[@]}" -r requirements/torch.txt
done_

begin "Megatron; torchvision and torchcodec fitted to torch"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
quietly "$python" -m pip install --quiet --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 \
    --require-hashes --target "$site" -r requirements/megatron.lock
cp scripts/site/_torchvision_cpu_fix.py "$site/"
echo 'import _torchvision_cpu_fix' >"$site/_torchvision_cpu_fix.pth"
quietly "$python" scripts/site/link_torchcodec.py
done_

begin "omnifleet, its library and its four services, editable"
editable=(-e . -e lib/refit)
for service in media rollout reward trainer; do editable+=(-e "services/$service"); done
packages --no-deps --no-build-isolation "${editable[@]}"
done_

echo "$want" >"$stamp"
echo "Ready in $((SECONDS - started)) s: $venv"
