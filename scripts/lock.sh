#!/usr/bin/env bash
# Resolves requirements/*.in into the locks. The present pins are kept where they still fit, so a second run changes
# nothing; `lock.sh --upgrade` or `lock.sh --upgrade-package NAME` moves them.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/uv ]; then
    uv=.venv/bin/uv
else
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet -r requirements/bootstrap.txt
    uv=$tools/bin/uv
fi

compile() {
    "$uv" pip compile --quiet --generate-hashes --no-emit-index-url --python-platform x86_64-manylinux_2_28 \
        --custom-compile-command scripts/lock.sh "$@" >/dev/null
}

compile requirements/cpu.in --overrides requirements/overrides.txt --excludes requirements/excludes.txt \
    --no-emit-package torch --python-version 3.11 --output-file requirements/cpu.lock "$@"
compile requirements/megatron.in --no-deps --python-version 3.12 --output-file requirements/megatron.lock "$@"
compile tests/locks/gyms.in --excludes tests/locks/gyms-excludes.txt --python-version 3.12 \
    --output-file tests/locks/gyms.lock "$@"
compile tests/locks/verifiers.in pyproject.toml --python-version 3.12 --output-file tests/locks/verifiers.lock "$@"
