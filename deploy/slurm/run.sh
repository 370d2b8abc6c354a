#!/usr/bin/env bash
# Checks a recipe and submits it: run.sh [-N NODES] [-G GPUS_PER_NODE] [-t TIME] [-p PARTITION] [-A ACCOUNT] [-n] RECIPE
# [section.field=value]…  (-n: say what would be submitted, and stop)
set -euo pipefail

usage() {
    echo "usage: run.sh [-N NODES] [-G GPUS_PER_NODE] [-t TIME] [-p PARTITION] [-A ACCOUNT] [-n] RECIPE [section.field=value]…" >&2
    exit 2
}

whole() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: $1 takes a whole number above 0, not '$2'" >&2; exit 2; }
}

nodes=1 gpus='' dry='' options=()
while getopts :N:G:t:p:A:n option; do
    case $option in
    N) whole -N "$OPTARG" && nodes=$OPTARG ;;
    G) whole -G "$OPTARG" && gpus=$OPTARG ;;
    t) options+=("--time=$OPTARG") ;;
    p) options+=("--partition=$OPTARG") ;;
    A) options+=("--account=$OPTARG") ;;
    n) dry="echo" ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || usage
[ -z "$gpus" ] || options+=("--gpus-per-node=$gpus")

omnifleet config check "$@"
$dry sbatch --nodes="$nodes" "${options[@]}" "$(dirname "$(realpath "$0")")/omnifleet.sbatch" "$@"
