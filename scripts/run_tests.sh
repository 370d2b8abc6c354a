#!/usr/bin/env bash
# Runs what `make test` runs, in two lanes side by side: tests that start engines and services mostly wait, so unit and contract
# tests have room beside them. The quick lane's output comes when it is over.
set -uo pipefail
cd "$(dirname "$0")/.."

pytest=(.venv/bin/python -m pytest -m "not soak and not gpu")
log=$(mktemp)
trap 'kill "$quick" 2>/dev/null; rm -f "$log"' EXIT

# A shell's background jobs ignore SIGINT, and so would what the tests start.
env --default-signal=INT "${pytest[@]}" tests/unit tests/contract >"$log" 2>&1 &
quick=$!
"${pytest[@]}" tests/chaos tests/integration
long_status=$?
wait "$quick"
quick_status=$?
echo
echo "Beside it: unit and contract tests"
cat "$log"
if [ $long_status -ne 0 ] || [ $quick_status -ne 0 ]; then
    echo "Failed: $([ $long_status -eq 0 ] || echo "tests/chaos tests/integration (above) ")$([ $quick_status -eq 0 ] || echo "tests/unit tests/contract")" >&2
    exit 1
fi
