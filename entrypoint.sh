#!/usr/bin/env bash
# The container's entry point. The program takes this shell's place as PID 1 and hears SIGTERM itself.
set -euo pipefail

case "${1:-serve}" in
    serve | plan | route) set -- "${SLIPWAY_PYTHON:-python3}" -m serving "$@" ;;
    -*) set -- "${SLIPWAY_PYTHON:-python3}" -m serving serve "$@" ;;
esac
case "$*" in
    *" -m serving"*) export PYTHONPATH="$(dirname "$(readlink -f "$0")")${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
exec "$@"
