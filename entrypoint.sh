#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The container's entry point: our verbs start Slipway, and so does what starts vLLM's server: a flag
# or a model without a verb, as vLLM's image takes them, `vllm serve`, and its server as a module
# (`called` in lmi_config/options/arguments.py). Anything else runs as given. Either takes this
# shell's place, as PID 1 in a container, and hears SIGTERM itself.
set -euo pipefail

# vLLM and LMCache would report each start and what they run, and the hub's client what it is used in.
export DO_NOT_TRACK=${DO_NOT_TRACK:-1}

[ $# -gt 0 ] || set -- serve
id='^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+$'
case $1 in
    serve | warm | plan | tune | route | keys | -* | s3://*) ;;
    *)
        case "${1##*/} ${2-} ${3-} " in
            "vllm serve "* | python*" -m vllm.entrypoints.openai.api_server ")
                [[ " $* " != *" --headless "* ]] || exec "$@" # the engine alone, for another node
                ;;
            *) [ -d "$1" ] || [[ $1 =~ $id && ! -e $1 ]] || exec "$@" ;;
        esac
        ;;
esac

# A driver older than the image's CUDA serves with the newer libraries of CUDA's forward
# compatibility, where its GPUs allow that; to a driver as new as they are they would do harm.
compat=${CUDA_HOME:-/usr/local/cuda}/compat
if [ "$1" != route ] && [ -e "$compat/libcuda.so.1" ]; then
    ours=$(readlink -f "$compat/libcuda.so.1")
    ours=${ours##*.so.}
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
    driver=${driver%%$'\n'*}
    oldest=$(printf '%s\n' "$driver" "$ours" | sort --version-sort | head -n 1)
    if [ -n "$driver" ] && [ "$driver" != "$ours" ] && [ "$driver" = "$oldest" ]; then
        export LD_LIBRARY_PATH=$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
fi

home=$(dirname "$(readlink -f "$0")")
export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}
# Signals wait until Python can hear them: PID 1 never gets those that come before.
# -P: Slipway's modules are found where it is, and not in the folder that it was called from.
exec env --block-signal=TERM,INT "${SLIPWAY_PYTHON:-python3}" -P -m serving "$@"
