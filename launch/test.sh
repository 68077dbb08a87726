#!/usr/bin/env bash
# Set up this machine and run all checks and tests. Usage: bash launch/test.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."

bash launch/setup.sh
bash launch/check.sh
exec .venv/bin/python -m pytest --durations=10 "$@"
