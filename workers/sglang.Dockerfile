# SGLang with Eyrie: the image of the stages that start SGLang (`engine: {kind: sglang}`: regenerate, benchmark, tune, prove;
# capture of a quantised target, or one larger than a GPU).
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
# The user of the other images, so that stages of either image write to one volume; root runs in SGLang's own image, whose
# caches would be in its home. The base's entry point stays: it starts what it is given. Endpoints run that image as another
# user already (cluster.serving.run_as).
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin eyrie \
    && install -d -o eyrie -g eyrie /var/lib/eyrie
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 EYRIE_HOME=/var/lib/eyrie HOME=/var/lib/eyrie
USER 10001:10001
WORKDIR /var/lib/eyrie
CMD ["python3", "-m", "eyrie_workers.stages.benchmark", "--help"]
