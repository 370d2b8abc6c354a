#!/usr/bin/env bash
# Runs what `make test` runs, or with `soak` what `make soak` runs, in two lanes side by side: tests that start engines and
# services mostly wait, so others have room beside them. The second lane's output comes when it is over.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = soak ]; then
    marked="soak and not gpu"
    # Chaos mostly waits, policies mostly compute.
    first=(tests/chaos tests/unit tests/contract tests/integration "--ignore-glob=*/integration/test_policy_*")
    second=(tests/integration/test_policy_*.py)
else
    marked="not soak and not gpu"
    first=(tests/chaos tests/integration)
    second=(tests/unit tests/contract)
fi
pytest=(.venv/bin/python -m pytest -m "$marked")
log=$(mktemp)
trap 'kill "$beside" 2>/dev/null; rm -f "$log"' EXIT

# A shell's background jobs ignore SIGINT, and so would what the tests start.
env --default-signal=INT "${pytest[@]}" "${second[@]}" >"$log" 2>&1 &
beside=$!
"${pytest[@]}" "${first[@]}"
first_status=$?
wait "$beside"
second_status=$?
echo
echo "The other lane:"
cat "$log"
if [ $first_status -ne 0 ] || [ $second_status -ne 0 ]; then
    echo "Failed:$([ $first_status -eq 0 ] || echo " first lane (above)")$([ $second_status -eq 0 ] || echo " other lane")" >&2
    exit 1
fi
