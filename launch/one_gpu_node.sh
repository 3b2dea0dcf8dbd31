#!/usr/bin/env bash
# All GPUs of this machine:  launch/one_gpu_node.sh CONFIG SCRIPT [ARGUMENT ...]
# The number of GPUs must be a multiple of the config's pipeline_parallel_degree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${RANKS:=$(nvidia-smi --list-gpus | wc -l)}"
exec "${PYTHON:-.venv/bin/python}" -m launch --ranks "$RANKS" "$@"
