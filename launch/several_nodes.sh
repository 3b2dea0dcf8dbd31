#!/usr/bin/env bash
# Run the same line on every node; RENDEZVOUS is a host and port that all of them reach:
#   NODES=2 RENDEZVOUS=node0:29400 launch/several_nodes.sh CONFIG SCRIPT [ARGUMENT ...]
# JOB tells apart runs that meet at one place. RANKS is per node, by default one for each GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${NODES:?how many nodes}" "${RENDEZVOUS:?host:port of one of them}" "${JOB:=smp}"
: "${RANKS:=$(nvidia-smi --list-gpus | wc -l)}"
exec "${PYTHON:-.venv/bin/python}" -m launch --ranks "$RANKS" \
    --nodes "$NODES" --rendezvous "$RENDEZVOUS" --job "$JOB" "$@"
