#!/bin/sh
# Records the incident logs of the shipped playbooks anew: sh playbooks/record.sh (from the project's root).
# The answers go to the tests, where nothing but a test reads them.
set -eu
out=playbooks/logs
answers=tests/fixtures/answers
rm -f "$out"/*/*.jsonl
record() { diagnose record --checkpoint embedded:qwen3_moe "$@"; }

# name, seed of the first healthy twin (the second has the next), seed of the incident, its fault as options
incident() {
  logs=$out/$1 answer=$answers/$1.json twin=$2 seed=$3
  shift 3
  record --seed "$twin" --out "$logs/healthy_1.jsonl"
  record --seed $((twin + 1)) --out "$logs/healthy_2.jsonl"
  record --seed "$seed" "$@" --out "$logs/incident.jsonl" --answers "$answer"
}

incident kl_spike 8101 4242 --fault learning_rate_too_high --from-step 21
incident rollout_gap 8201 5151 --fault expert_permutation
incident reward_stalls 8301 6161 --fault weight_sync_skipped --from-step 16
incident steady_gap 8401 7171 --fault rollout_temperature_missing
