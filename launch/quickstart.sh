#!/usr/bin/env bash
# Set up this machine and run the main job on real input: train a tiny Qwen-Image under FSDP2,
# merge its rank files under torchrun, check and reload the result.
# Usage: bash launch/quickstart.sh [FOLDER]       default folder: quickstart_run/<number>
set -euo pipefail
cd "$(dirname "$0")/.."

bash launch/setup.sh
exec .venv/bin/python -m examples.quickstart "$@"
