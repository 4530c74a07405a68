#!/usr/bin/env bash
# Runs the images that `make image-api image-operator image-workers` built, with CONTAINER (docker, podman or buildah):
# who they run as, what they must not contain, tables made and the API asked, a stage program, and the operator's command.
set -euo pipefail
container=${CONTAINER:-docker} prefix=${PREFIX:-eyrie} tag=${TAG:?}

# in_image IMAGE SCRIPT: a shell in a container of the image, removed afterwards
in_image() {
  case $container in
    buildah)
      local made code=0
      made=$(buildah from "$prefix/$1:$tag")
      buildah run "$made" -- sh -euc "$2" || code=$?
      buildah rm "$made" >/dev/null
      return "$code"
      ;;
    *) "$container" run --rm --entrypoint sh "$prefix/$1:$tag" -euc "$2" ;;
  esac
}
without() { echo "import importlib.util as u; found = [n for n in '$1'.split() if u.find_spec(n)]; assert not found, found"; }
of_eyrie='test "$(id -u)" = 10001 && test ! -w /opt/eyrie'

in_image api "$of_eyrie; python -c \"$(without 'torch kfp kubernetes pytest')\"
  eyrie migrate
  # \`up\` is the same server with chores of its own: it needs no Redis, which no image contains.
  eyrie up --port 18642 > /tmp/up.log 2>&1 & pid=\$!
  python - <<'END' || { cat /tmp/up.log; exit 1; }
import time, httpx
for _ in range(600):
    try:
        ready = httpx.get('http://127.0.0.1:18642/readyz', timeout=5)
        break
    except httpx.TransportError:
        time.sleep(0.1)
assert ready.status_code == 200, ready.text
assert httpx.get('http://127.0.0.1:18642/v1alpha1/jobs', timeout=30).json()['items'] == []
assert 'Eyrie' in httpx.get('http://127.0.0.1:18642/', timeout=30).text
END
  kill \$pid; wait \$pid || true"
echo "api: passed"

in_image operator "$of_eyrie; python -c \"$(without 'torch transformers pytest')\"
  eyrie operator --help > /dev/null; eyrie worker --help > /dev/null
  python -c 'import eyrie_operator.cluster.program, eyrie_operator.control_plane, eyrie_pipelines.kubeflow'"
echo "operator: passed"

in_image workers "$of_eyrie; python -c \"$(without 'sqlalchemy pytest')\"
  cd /tmp && printf '%s' '{}' > spec.json
  # A spec that lacks everything: the program starts, and says what is missing.
  if python -m eyrie_workers.stages.train --spec spec.json --out out/manifest.json 2> said.txt; then exit 1; fi
  grep -q 'error: ' said.txt || { cat said.txt; exit 1; }
  python -c 'import torch, transformers, kfp.dsl, eyrie_pipelines.kfp_pipeline, eyrie_workers.stages.prove as p; print(torch.__version__)'"
echo "workers: passed"
