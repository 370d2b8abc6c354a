#!/usr/bin/env bash
# Runs what `make test` runs, or with `soak` what `make soak` runs, in two lanes side by side: tests that start engines and
# services mostly wait, so others have room beside them. The second lane's output comes when it is over.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = soak ]; then
    marked="soak and not gpu"
    # Chaos mostly waits, policies mostly compute. Those have a process a file: worlds of ranks leave gloo's threads behind, 2,300
    # of them in one process, which then spends a third of its time in the kernel.
    # Tests of sounds are with them so that both lanes take about as long.
    first=(tests/chaos tests/unit tests/contract tests/integration "--ignore-glob=*/integration/test_policy_*" "--ignore-glob=*/integration/test_*_sounds.py")
    mapfile -t second < <(grep -l 'mark\.soak' tests/integration/test_policy_*.py tests/integration/test_{openai,worker}_sounds.py)
    apart=1
else
    marked="not soak and not gpu"
    first=(tests/chaos tests/integration)
    second=(tests/unit tests/contract)
fi
# A shell's background jobs ignore SIGINT, and so would what the tests start.
pytest=(env --default-signal=INT .venv/bin/python -m pytest -m "$marked")
log=$(mktemp)
trap 'kill -- "-$beside" 2>/dev/null; rm -f "$log"' EXIT

other_lane() {
    [ -n "${apart:-}" ] || exec "${pytest[@]}" "${second[@]}"
    local status=0
    for file in "${second[@]}"; do
        "${pytest[@]}" "$file"
        case $? in 0 | 5) ;; *) status=1 ;; esac # 5: none of its tests is of this kind
    done
    return $status
}

set -m # a group of its own, so that all of it ends with this script
other_lane >"$log" 2>&1 &
beside=$!
set +m
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
