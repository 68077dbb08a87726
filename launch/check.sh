#!/usr/bin/env bash
# Lint, format, types, import contract. Usage: bash launch/check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
