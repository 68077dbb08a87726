#!/usr/bin/env bash
# Merge on this machine with several processes.
# Usage: bash launch/local.sh MERGE_OPTIONS...
#   NPROC=4 bash launch/local.sh --local_dir actor --base_model Qwen-Image --target_dir out \
#       --trust-checkpoint
# NPROC: processes, 2 if not given. `torchrun` must be on the PATH.
set -euo pipefail

exec torchrun --standalone --nproc_per_node="${NPROC:-2}" -m dist_merge merge "$@"
