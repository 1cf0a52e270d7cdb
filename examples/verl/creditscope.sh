#!/usr/bin/env bash
# verl 0.9 with DAPO of our table as advantage and loss, and its FSDP2 engine under the microscope.
#
#   bash examples/verl/creditscope.sh [verl settings ...]
#
# TRAIN and TEST are parquet files as verl's data preparation writes them; MODEL is a folder or a hub's name.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

# Loaded by name, an error of the plugin is raised; through the entry point verl logs it at DEBUG level only.
export VERL_USE_EXTERNAL_MODULES=creditscope.plugins.verl.plugin
export VERL_ENGINE_VENDOR=creditscope   # the engine under the microscope; leave it out to have the losses alone
export CREDITSCOPE_EVERY="${CREDITSCOPE_EVERY:-10}"

# Step 0, before anything is loaded on a GPU: are the names known?
python -c "import verl; from creditscope.plugins.verl import assert_registered as known; known('creditscope_dapo')"

python -m verl.trainer.main_ppo \
    --config-path "$here" --config-name creditscope \
    data.train_files="${TRAIN:?a parquet file}" data.val_files="${TEST:?a parquet file}" \
    actor_rollout_ref.model.path="${MODEL:?a model}" \
    "$@"
