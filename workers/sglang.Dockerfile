# SGLang with Eyrie: the image of the stages that start SGLang (`engine: {kind: sglang}`: regenerate, benchmark, tune, prove).
# Endpoints need it not: they run SGLang's own image, and an init container brings our package.
# From the repository's root:
#
#   make image-sglang
#
# The target looks up the digest of the tag, and builds on that; make image-sglang SGLANG=docker.io/lmsysorg/sglang:v0.5.23@sha256:...
# builds on the one that you name. The label says which it was.
ARG SGLANG=docker.io/lmsysorg/sglang:v0.5.23

FROM ${SGLANG}
ARG SGLANG
LABEL org.opencontainers.image.base.name="${SGLANG}"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE /source/
COPY api /source/api
COPY kernels /source/kernels
COPY operator /source/operator
COPY pipelines /source/pipelines
COPY workers /source/workers
# What SGLang brings stays as it is, torch and transformers above all. What it lacks is installed by version, without
# dependencies: its Python may be another than that of our lists of hashes.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip list --format=freeze | sed 's/==.*//' | tr 'A-Z_.' 'a-z--' > /tmp/brought.txt \
    && sed -n 's/^\([^# ]*==[^ ]*\).*/\1/p' /source/workers/requirements.txt \
       | awk -F== 'NR == FNR { brought[$1] = 1; next } !($1 in brought)' /tmp/brought.txt - > /tmp/lacking.txt \
    && pip install --no-deps -r /tmp/lacking.txt && pip install --no-deps /source && rm -r /source /tmp/*.txt
