#!/usr/bin/env bash
# The container's entry point: our verbs start Slipway, anything else runs as given. Either takes
# this shell's place, as PID 1 in a container, and hears SIGTERM itself.
set -euo pipefail

[ $# -gt 0 ] || set -- serve
case $1 in
    serve | plan | route) ;;
    *) exec "$@" ;;
esac

home=$(dirname "$(readlink -f "$0")")
# The hub is asked for models and nothing else.
export HF_HUB_DISABLE_TELEMETRY=${HF_HUB_DISABLE_TELEMETRY:-1}
export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}
exec "${SLIPWAY_PYTHON:-python3}" -m serving "$@"
