#!/usr/bin/env bash
# OpenRLHF's GRPO with its policy under the microscope: settings after the script's name go to OpenRLHF.
#   MODEL=path/to/model PROMPTS=train.jsonl REWARD=reward.py bash examples/openrlhf/creditscope.sh
set -euo pipefail
export CREDITSCOPE_OUT="${CREDITSCOPE_OUT:-runs/openrlhf}" CREDITSCOPE_EVERY="${CREDITSCOPE_EVERY:-10}"
python -m creditscope.plugins.openrlhf.train \
  --actor.model_name_or_path "$MODEL" --data.prompt_dataset "$PROMPTS" --reward.remote_url "$REWARD" \
  --algo.advantage.estimator group_norm --actor.policy_loss_type ppo --actor.loss_agg_mode token-mean \
  --rollout.n_samples_per_prompt 8 --ds.zero_stage 2 --ds.param_dtype bf16 "$@"
creditscope report "$CREDITSCOPE_OUT"
