#!/usr/bin/env bash
# Runs once, in the new environment and from the repository: registers the vLLM plugin.
set -euo pipefail
python -m pip install --no-deps --editable .
