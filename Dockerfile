# The image, for both engines: `scripts/build cpu` and `scripts/build gpu` build it.
#
# Old and new BuildKit and Buildah all read it: no heredocs, no syntax line, no new flags. Build
# secrets, all optional: `packages`, a shell file with variables for pip and uv, and the files that
# it names.
#
# BASE_IMAGE, by default the one below, is like Debian 12; its own Python 3.11 runs everything, and
# what it has, such as certificates, is not replaced. WHEELS_IMAGE may have wheels at its root that no
# index has. CUDA, its compiler included, comes from the wheels that requirements/gpu.txt locks.
ARG ENGINE=gpu
ARG BASE_IMAGE=base
ARG WHEELS_IMAGE=scratch

# `scripts/lock images` pins it by what its tag means today.
FROM docker.io/library/debian:bookworm-slim@sha256:abd67ffcfa541b485a3dff59865ab629aa048a6c613e639d36e7456b0b229241 AS base

# hadolint ignore=DL3006
FROM ${WHEELS_IMAGE} AS wheels

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS uv
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends --no-upgrade \
        ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,source=scripts/env.sh,target=/run/build/scripts/env.sh \
    --mount=type=secret,id=packages --mount=type=secret,id=uv_toml --mount=type=secret,id=ca \
    bash -euc 'if [ -f /run/secrets/packages ]; then . /run/secrets/packages; fi; \
        . /run/build/scripts/env.sh && find_uv && cp "$SLIPWAY_UV" /uv'


# Python, the engine, and what they load from the system.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS engine
ARG ENGINE
# With a GPU, Triton, FlashInfer and DeepGEMM compile kernels when they are first used; without what
# they have no use for: link-time optimisation, sanitizers, and a Python to link with.
# hadolint ignore=DL3008,SC2086
RUN packages="ca-certificates libgomp1 libnuma1 python3" \
    && if [ "$ENGINE" = gpu ]; then packages="$packages g++ python3-dev"; fi \
    && apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends --no-upgrade \
        $packages \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt \
        /var/log/dpkg.log /usr/lib/gcc/*/*/lto1 /usr/lib/gcc/*/*/lib*san* \
        /usr/lib/*/libpython3*.a /usr/lib/python3*/config-*/*.a
# In two layers, which are pulled side by side, the first not with every release: torch and what it
# loads of CUDA, then the engine.
RUN --mount=type=bind,source=scripts/env.sh,target=/run/build/scripts/env.sh \
    --mount=type=bind,source=requirements,target=/run/build/requirements \
    --mount=type=bind,from=uv,source=/uv,target=/run/build/uv \
    --mount=type=bind,from=wheels,target=/run/build/wheels \
    --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=packages --mount=type=secret,id=uv_toml --mount=type=secret,id=ca \
    bash -euc 'if [ -f /run/secrets/packages ]; then . /run/secrets/packages; fi; \
        . /run/build/scripts/env.sh; in_image "$ENGINE"; \
        uv venv --quiet --python /usr/bin/python3 "$venv"; \
        install <(grep -E "^(torch|triton|nvidia-.+)==" "$root/requirements/$ENGINE.txt"); \
        if [ "$ENGINE" = gpu ]; then complete_cuda; fi; \
        slim "$ENGINE"'
# hadolint ignore=DL3059
RUN --mount=type=bind,source=scripts/env.sh,target=/run/build/scripts/env.sh \
    --mount=type=bind,source=requirements,target=/run/build/requirements \
    --mount=type=bind,from=uv,source=/uv,target=/run/build/uv \
    --mount=type=bind,from=wheels,target=/run/build/wheels \
    --mount=type=cache,target=/root/.cache/uv \
    --mount=type=secret,id=packages --mount=type=secret,id=uv_toml --mount=type=secret,id=ca \
    bash -euc 'if [ -f /run/secrets/packages ]; then . /run/secrets/packages; fi; \
        . /run/build/scripts/env.sh; in_image "$ENGINE"; \
        install "$root/requirements/$ENGINE.txt"; \
        works; \
        slim "$ENGINE"; \
        if [ "$ENGINE" = cpu ]; then name_vllm; else ln -s "$(site)/nvidia/cu13" /usr/local/cuda; fi'


FROM engine AS engine-cpu


# As NVIDIA's own images say it to the container's runtime, and where some put the driver.
FROM engine AS engine-gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    CUDA_HOME=/usr/local/cuda \
    PATH=/usr/local/nvidia/bin:/usr/local/cuda/bin:$PATH


# For SageMaker, which starts containers as root.
# hadolint ignore=DL3006
FROM engine-${ENGINE} AS sagemaker
COPY --chmod=755 entrypoint.sh LICENSE NOTICE /opt/slipway/
COPY --chmod=755 lmi_config /opt/slipway/lmi_config
COPY --chmod=755 handlers /opt/slipway/handlers
COPY --chmod=755 serving /opt/slipway/serving
COPY --chmod=755 slipway.dist-info /opt/slipway/slipway.dist-info
# A build machine without a GPU may be unable to import some; vLLM then inspects those at the start.
RUN PYTHONPATH=/opt/slipway VLLM_LOGGING_LEVEL=ERROR /opt/venv/bin/python3 -m serving.engine.model_infos \
        /opt/venv/share/slipway/modelinfos || echo "no model infos in this image"
RUN python3 -m compileall -q /opt/slipway
WORKDIR /opt/slipway
# Any user can run it, also one without a name, and the root may be read-only: what is written, with
# all caches, is under /tmp.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    USER=slipway \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    OPTION_HOST=0.0.0.0
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=30m \
    CMD ["env", "PYTHONPATH=/opt/slipway", "python3", "-P", "-m", "serving.server.healthcheck"]
ENTRYPOINT ["/opt/slipway/entrypoint.sh"]
CMD ["serve"]
# scripts/build adds those that differ from build to build.
LABEL org.opencontainers.image.title="Slipway" \
    org.opencontainers.image.description="A model-serving container: vLLM behind SageMaker's and OpenAI's APIs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true"
# SageMaker then lets multi-model endpoints use the image.
ARG MULTI_MODELS=false
LABEL com.amazonaws.sagemaker.capabilities.multi-models="${MULTI_MODELS}"


FROM sagemaker AS default
USER 2000:0
