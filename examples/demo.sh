#!/usr/bin/env bash
# A handoff between two embedded models, from nothing: fit, transfer, how good, how fast.
set -euo pipefail

examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HF_HUB_OFFLINE=1 KVMAP_CACHE="$scratch/cache"
cd "$scratch"

step() {
    printf '\n$ %s\n' "$*"
    "$@"
}

python "$examples/story.py" > story.txt 2> answer.txt
step kvmap fit tiny-m tiny-l -o m-l.map --sequences 100 --length 512 --stride 1
step kvmap transfer m-l.map --prompt-file story.txt --generate 1 --compare
printf 'the story says: %s\n' "$(cat answer.txt)"
step kvmap eval m-l.map --limit 100
step kvmap bench m-l.map --context 1024,4096 --budget 5
printf '\nNext: `kvmap fit tiny-m tiny-l -o m-l.map` keeps the map; `kvmap plan qwen3-8b qwen3-14b` says\n'
printf 'what a pair of your own would take. The commands are in %s.\n' "$(dirname "$(command -v kvmap)")"
