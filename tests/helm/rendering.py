"""The chart, rendered by Helm's own Go SDK, as a test wants it: values in, objects out.

The SDK (PyPI `helm-python-sdk`, 75 MB) is not part of the fast tier's environment: `make test-helm` installs it, and
without it the tests that render are skipped.
"""

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.seed_job import laid_over

CHART = Path(__file__).parents[2] / "helm" / "eyrie"
EVERYTHING = ("gateway.networking.k8s.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1")
"""APIs that a well-equipped cluster has beside Kubernetes' own."""

Object = dict[str, Any]
Values = dict[str, Any]


def sdk() -> Any:
    """Helm's SDK; skips the test where it is not installed."""
    return pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make test-helm")


class Rendered(list[Object]):
    """The objects of one rendering."""

    def of(self, kind: str, name: str | None = None) -> list[Object]:
        return [one for one in self if one["kind"] == kind and name in (None, one["metadata"]["name"])]

    def the(self, kind: str, name: str) -> Object:
        (found,) = self.of(kind, name)
        return found

    def pods(self) -> Iterator[tuple[str, Object]]:
        """(name, pod template) of everything that runs."""
        for one in self:
            if one["kind"] in ("Deployment", "StatefulSet", "Job"):
                yield f"{one['kind']}/{one['metadata']['name']}", one["spec"]["template"]

    def containers(self) -> Iterator[tuple[str, Object]]:
        for name, template in self.pods():
            for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
                yield f"{name}/{container['name']}", container


def render(values: Values | None = None, *, kube: str = "1.37.0", apis: tuple[str, ...] = (),
           name: str = "rel", namespace: str = "team") -> Rendered:
    """What an installation of these values would send to a server of that version. Raises what Helm raises."""
    helm = sdk()
    options = {"name": name, "namespace": namespace, "kube_version": f"v{kube}", "api_versions": list(apis)}
    with helm.Chart.load(CHART) as chart:
        # Chart.render() hides two of the C library's options, the server's version and APIs: hence one floor deeper.
        # The package is pinned (pyproject).
        result = helm._native.call_string("helm_render", chart._raw(), json.dumps(values or {}), json.dumps(options))
    texts = [text for path, text in json.loads(result).items() if path.endswith(".yaml")]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where it can be had: the definitions are long
    return Rendered(one for text in texts for one in yaml.load_all(text, Loader=loader) if one)


def from_file(*names: str) -> Values:
    """Values files of the chart, each laid over those before it."""
    loaded: Iterator[Values] = (yaml.safe_load((CHART / name).read_text()) for name in names)
    return reduce(laid_over, loaded)


EXTERNAL: Values = {
    "database": {"url": "postgresql://eyrie:pg-secret-word@db.example:5432/eyrie"},
    "broker": {"url": "redis://:redis-secret-word@redis.example:6379/0"},
    "artifacts": {"url": "s3://bucket/prefix", "endpointUrl": "https://s3.example",
                  "credentials": {"accessKey": "s3-access-word", "secretKey": "s3-secret-word"}},
    "api": {"token": {"value": "token-secret-word-0123"}},
    "secretKey": {"value": "webhook-secret-word-0123456789-0123456789-0="},
}
SECRET_WORDS = ("pg-secret-word", "redis-secret-word", "s3-access-word", "s3-secret-word", "token-secret-word",
                "webhook-secret-word")

SETS: dict[str, tuple[Values, tuple[str, ...]]] = {
    "default": ({}, ()),
    "high availability": (from_file("values-ha.yaml"), ()),
    "GPUs": (from_file("values-ha.yaml", "values-gpu.yaml"), ()),
    "a shared file system": (from_file("values-ha.yaml", "values-gpu.yaml", "values-volume.yaml"), ()),
    "air-gapped": (from_file("values-ha.yaml", "values-gpu.yaml", "values-air-gapped.yaml"), ()),
    "a company": (from_file("values-ha.yaml", "values-gpu.yaml", "values-company.yaml"), EVERYTHING),
    "external stores by plain values": (EXTERNAL, ()),
    "namespaced": ({"operator": {"namespaced": True, "watchNamespaces": ["a", "b"], "mirrorNamespace": "a"},
                    "rbac": {"userRoles": False}}, ()),
    "cluster-wide": ({"operator": {"namespaced": False}}, ()),
    "everything on": ({
        "api": {"replicas": 2, "ingress": {"enabled": True, "host": "eyrie.example", "className": "nginx",
                                           "tlsSecret": "tls", "annotations": {"a": "b"}},
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["eyrie.example"]},
                "service": {"annotations": {"c": "d"}}, "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/certs/ca"}],
                "serviceAccount": {"annotations": {"e": "f"}}, "podAnnotations": {"g": "h"},
                "nodeSelector": {"kubernetes.io/os": "linux"}, "tolerations": [{"operator": "Exists"}],
                "affinity": {"nodeAffinity": {}}, "priorityClassName": "high"},
        "worker": {"replicas": 2, "keda": {"enabled": True}},
        "shards": {"enabled": True, "keda": {"enabled": True}, "extraEnv": [
            {"name": "MODEL_KEY", "valueFrom": {"secretKeyRef": {"name": "model", "key": "key"}}}]},
        "operator": {"replicas": 2},
        "images": {"registry": "registry.example/team", "pullSecrets": ["pull"]},
        "cluster": {"kubeflow": {"url": "https://kubeflow.example"},
                    "access": {"tokenAudience": "pipelines.kubeflow.org", "caConfigMap": "ca"},
                    "per_stage": {"train": {"num_gpus": 8}}},
        "settings": {"lease_ttl_s": 60, "max_body_bytes": 2097152},
        "home": {"volume": {"persistentVolumeClaim": {"claimName": "shared"}}},
        "extraVolumes": [{"name": "certs", "configMap": {"name": "certs"}}],
        "extraVolumeMounts": [{"name": "certs", "mountPath": "/certs"}],
        "networkPolicy": {"apiFrom": [{"namespaceSelector": {}}], "metricsFrom": [{"podSelector": {}}],
                          "enginesFrom": [{"namespaceSelector": {}}],
                          "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
        "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                       "rules": {"enabled": True}, "dashboard": {"enabled": True}},
        "bundled": {"keep": False},
    }, EVERYTHING),
}
