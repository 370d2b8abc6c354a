#!/usr/bin/env bash
# Finds or installs the programs that tests start: a Redis server, Chromium and NeMo Gym.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup_nemo_gym.sh >/dev/null || echo "[test tools] its tests will fail" >&2

packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
    || packages+=(chromium)
[ ${#packages[@]} -gt 0 ] || exit 0

started=$SECONDS
printf '[test tools] installing %s … ' "${packages[*]}"
scripts/apt_install.sh "${packages[@]}"
printf '%d s\n' $((SECONDS - started))
