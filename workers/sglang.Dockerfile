# syntax=docker/dockerfile:1
# SGLang with Eyrie: the image of the stages that start SGLang (`engine: {kind: sglang}`: regenerate, benchmark, tune, prove).
# Endpoints need it not: they run SGLang's own image, and an init container brings our package.
# From the repository's root:
#
#   make image-sglang
#
# By digest: --build-arg SGLANG=docker.io/lmsysorg/sglang@sha256:...
ARG SGLANG=docker.io/lmsysorg/sglang:v0.5.23

FROM ${SGLANG}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE /source/
COPY api /source/api
COPY kernels /source/kernels
COPY operator /source/operator
COPY pipelines /source/pipelines
COPY workers /source/workers
# What SGLang brings stays as it is, torch and transformers above all: its versions are the constraints of what it lacks.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip freeze --exclude-editable | grep == > /tmp/held.txt \
    && pip install -c /tmp/held.txt "/source[workers,pipelines]" && rm -r /source /tmp/held.txt
