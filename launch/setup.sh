#!/usr/bin/env bash
# Set up `.venv` for this repository: torch first, then the package with its test extra.
# Usage: bash launch/setup.sh        (again: returns at once when nothing changed)
#   PYTHON=python3.12 bash launch/setup.sh     another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
stamp=.venv/.dist_merge_stamp
wanted="$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  echo "[setup] .venv is up to date"
  exit 0
fi

if [ ! -x .venv/bin/python ]; then
  # A GPU build of torch that is already there is used as it is: its folder is put on the path.
  gpu_torch="$("$python" -c 'import os, torch
if torch.version.cuda: print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true)"
  echo "[setup] making .venv with $("$python" --version)"
  "$python" -m venv .venv
  if [ -n "$gpu_torch" ]; then
    echo "[setup] using the GPU build of torch that is installed"
    packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$gpu_torch" >"$packages/installed_torch.pth"
  fi
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  torch="$(grep '^torch==' constraints.txt)"
  echo "[setup] installing $torch"
  .venv/bin/pip install --quiet --disable-pip-version-check "$torch"
fi
echo "[setup] installing dist_merge and what its tests need"
pins="$(mktemp)"
trap 'rm -f "$pins"' EXIT
# The torch that is there stays, whatever its version.
grep -v '^torch==' constraints.txt >"$pins"
.venv/bin/python -c 'import torch; print("torch==" + torch.__version__)' >>"$pins"
.venv/bin/pip install --quiet --disable-pip-version-check -c "$pins" -e '.[test]'
echo "$wanted" >"$stamp"
echo "[setup] done"
