#!/usr/bin/env bash
# Finds or installs the programs that tests start: a Redis server, Chromium, NeMo Gym and OpenEnv.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup_gyms.sh >/dev/null || echo "[test tools] its tests will fail" >&2

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
    || packages+=(chromium)
[ ${#packages[@]} -gt 0 ] || exit 0

started=$SECONDS
printf '[test tools] installing %s … ' "${packages[*]}"
scripts/apt_install.sh "${packages[@]}"
printf '%d s\n' $((SECONDS - started))
