#!/usr/bin/env bash
# Merge on several machines; see docs/clusters.md. Run it on each, with its own NODE_RANK.
# Usage: NNODES=N NODE_RANK=n MASTER_ADDR=HOST bash launch/multi_node.sh MERGE_OPTIONS...
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 GLOO_SOCKET_IFNAME=eth0 bash launch/multi_node.sh \
#       --local_dir /scratch/actor --base_model Qwen-Image --target_dir out --trust-checkpoint
# MASTER_ADDR: the machine with NODE_RANK=0; only it needs the base and the target's folder.
# MASTER_PORT: a free port there, 29500 if not given. NPROC: processes on each machine, 2 if not given.
set -euo pipefail

exec torchrun --nnodes="${NNODES:?}" --node_rank="${NODE_RANK:?}" \
  --master_addr="${MASTER_ADDR:?}" --master_port="${MASTER_PORT:-29500}" \
  --nproc_per_node="${NPROC:-2}" -m dist_merge merge "$@"
