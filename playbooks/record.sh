#!/bin/sh
# Records the incident logs of the shipped playbooks anew: sh playbooks/record.sh (from the project's root).
# The answers go to the tests, where nothing but a test reads them.
set -eu
out=playbooks/logs
answers=tests/fixtures/answers
rm -f "$out"/*/*.jsonl
record() { diagnose record --checkpoint embedded:qwen3_moe "$@"; }

record --seed 8101 --out "$out/kl_spike/healthy_1.jsonl"
record --seed 8102 --out "$out/kl_spike/healthy_2.jsonl"
record --seed 4242 --fault learning_rate_too_high --from-step 21 --out "$out/kl_spike/incident.jsonl" \
  --answers "$answers/kl_spike.json"

record --seed 8201 --out "$out/rollout_gap/healthy_1.jsonl"
record --seed 8202 --out "$out/rollout_gap/healthy_2.jsonl"
record --seed 5151 --fault expert_permutation --out "$out/rollout_gap/incident.jsonl" \
  --answers "$answers/rollout_gap.json"

record --seed 8301 --out "$out/reward_stalls/healthy_1.jsonl"
record --seed 8302 --out "$out/reward_stalls/healthy_2.jsonl"
record --seed 6161 --fault weight_sync_skipped --from-step 16 --out "$out/reward_stalls/incident.jsonl" \
  --answers "$answers/reward_stalls.json"

record --seed 8401 --out "$out/steady_gap/healthy_1.jsonl"
record --seed 8402 --out "$out/steady_gap/healthy_2.jsonl"
record --seed 7171 --fault rollout_temperature_missing --out "$out/steady_gap/incident.jsonl" \
  --answers "$answers/steady_gap.json"
