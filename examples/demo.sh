#!/usr/bin/env bash
# The tour: from a model's name to an explained and a proved plan, and a running training. Each command is shown, run
# and timed.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/demo
mkdir -p "$out"
TIMEFORMAT='   (%R s)'

run() {
    local word shown=""
    for word in "$@"; do
        case $word in *" "*) shown+=" \"$word\"" ;; *) shown+=" $word" ;; esac
    done
    printf '\n$%s\n' "$shown"
    time "$@"
}

run shardwise fit llama-3.1-8b --on 8xh100
run shardwise plan llama-3.1-70b --on 64x8xh100 --seq 8192 --batch-tokens 4M --why-not "tp=8 pp=4 dp=16 zero=1 mb=1"
run shardwise schedules zb-v --pp 4 --micro-batches 8
run shardwise show llama-3.1-405b --on 2048x8xh100 --seq 8192 --batch-tokens 16M \
    --layout "tp=8 pp=16 dp=128 zero=1 mb=1"
run shardwise plan llama-3.1-70b --on 64x8xh100 --seq 8192 --batch-tokens 4M --runnable -o "$out/plan.toml"
run shardwise prove "$out/plan.toml" --rank 0
run shardwise train examples/tiny.toml --steps 50
