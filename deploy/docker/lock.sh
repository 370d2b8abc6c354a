#!/usr/bin/env bash
# Resolves what each image installs into deploy/docker/locks/, from the same pyproject.toml files as everything else.
# lock.sh [SERVICE]… (default: all). Present pins are kept where they still fit; the CPU images follow requirements/cpu.lock.
set -euo pipefail
cd "$(dirname "$0")/../.."

uv=${UV:-.venv/bin/uv}
locks=deploy/docker/locks
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Installed from the source tree, so never from an index.
printf '%s\n' omnifleet omnifleet-refit >"$scratch/excludes.txt"
# What the CPU environment does not pin for a GPU: its own torch and engine. Everything else of it holds there too.
grep -E '^[a-z0-9][a-z0-9._-]*==' requirements/cpu.lock | sed 's/ .*//' >"$scratch/cpu.txt"

# compile SERVICE PYTHON OPTIONS…
compile() {
    local service=$1 folder=$1 python=$2
    shift 2
    [ "$service" = gateway ] && folder=rollout
    echo "resolving $service"
    "$uv" pip compile --quiet --generate-hashes --no-emit-index-url --python-platform x86_64-manylinux_2_28 \
        --python-version "$python" --custom-compile-command deploy/docker/lock.sh \
        --output-file "$locks/$service.lock" pyproject.toml "services/$folder/pyproject.toml" "$@" >/dev/null
    sed -i "s|$scratch/||" "$locks/$service.lock"  # else every run would change every lock
}

# gpu SERVICE OPTIONS…: the versions that ran together on a GPU machine are in gpu.txt.
gpu() {
    local service=$1
    shift
    compile "$service" 3.12 --constraint deploy/docker/gpu.txt "$@"
}

for service in "${@:-all}"; do
    case $service in all | media)
        # torch is a step of its own, as in scripts/setup_env.sh: a CPU build where an index offers one.
        cat "$scratch/excludes.txt" requirements/excludes.txt >"$scratch/media-excludes.txt"
        compile media 3.11 --excludes "$scratch/media-excludes.txt" --constraint "$scratch/cpu.txt" \
            --constraint requirements/torch.txt --no-emit-package torch --extra segments --extra video --extra redis
        ;;&
    all | reward) compile reward 3.11 --excludes "$scratch/excludes.txt" --constraint "$scratch/cpu.txt" ;;&
    all | gateway) compile gateway 3.11 --excludes "$scratch/excludes.txt" --constraint "$scratch/cpu.txt" ;;&
    all | rollout) gpu rollout --excludes "$scratch/excludes.txt" --extra cuda ;;&
    all | trainer)
        cat "$scratch/excludes.txt" deploy/docker/trainer-excludes.txt >"$scratch/trainer-excludes.txt"
        gpu trainer --excludes "$scratch/trainer-excludes.txt" --extra automodel
        ;;
    esac
done
