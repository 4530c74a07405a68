"""values.schema.json: strict, described, in step with values.yaml; wrong values are refused in words."""

import json
from typing import Any

import jsonschema
import pytest

from tests.helm.rendering import CHART, Values, from_file, render, sdk
from tests.helm.values_table import PAGE, page_with, profile_definitions, resolved, settings_schema, table

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

PROFILED = (".cluster.kubeflow", ".cluster.stages", ".cluster.per_stage", ".cluster.serving", ".cluster.model_cache")


def test_the_defaults_pass() -> None:
    jsonschema.validate(from_file("values.yaml"), SCHEMA)


def test_every_default_is_described_and_everything_described_has_a_default() -> None:
    def compare(value: object, schema: dict[str, Any], path: str) -> None:
        schema = resolved(schema, SCHEMA)
        assert len(schema["description"]) > 3, path
        properties = schema.get("properties")
        if path in PROFILED:  # its words are the contract's, its defaults too
            assert properties is None or schema["additionalProperties"] is False
            return
        if properties is None or not isinstance(value, dict):
            return
        assert schema["additionalProperties"] is False, path
        for name, one in value.items():
            assert name in properties, f"{path}.{name}"
            compare(one, properties[name], f"{path}.{name}")
        assert path == ".settings" or set(properties) - set(value) <= {"global", "claims", "requests", "limits"}, path

    compare(from_file("values.yaml"), SCHEMA, "")


def test_every_value_is_read_by_some_template() -> None:
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))

    def names(values: object) -> set[str]:
        if not isinstance(values, dict):
            return set()
        return set(values) | {inner for one in values.values() for inner in names(one)}

    values = from_file("values.yaml")
    handed_on = {"runAsUser", "runAsGroup", "fsGroup", "runAsNonRoot", "seccompProfile", "type", "drop", "requests",
                 "limits", "cpu", "memory", "emptyDir", "allowPrivilegeEscalation", "readOnlyRootFilesystem",
                 "capabilities", "grafana_dashboard"}
    unread = {name for name in names(values) - handed_on if f".{name}" not in templates}
    assert unread == set()


def test_schema_and_page_of_values_match_settings_and_values() -> None:
    hint = "python -m tests.helm.values_table"
    assert SCHEMA["properties"]["settings"] == settings_schema(), hint
    assert {**SCHEMA["definitions"], **profile_definitions()} == SCHEMA["definitions"], hint
    assert PAGE.read_text() == page_with(table()), hint


@pytest.mark.parametrize(("values", "words"), [
    ({"api": {"replicas": "two"}}, ["/api/replicas", "integer"]),
    ({"api": {"replica": 2}}, ["/api", "replica"]),
    ({"worker": {"concurrency": 0}}, ["/worker/concurrency", "minimum"]),
    ({"images": {"api": {"tag": "latest"}}}, ["/images/api/tag"]),
    ({"images": {"api": {"digest": "sha256:12"}}}, ["/images/api/digest", "pattern"]),
    ({"database": {"url": "mysql://host/db"}}, ["/database/url", "pattern"]),
    ({"artifacts": {"addressing": "both"}}, ["/artifacts/addressing", "auto", "path", "virtual"]),
    ({"api": {"token": {"value": "short"}}}, ["/api/token/value"]),
    ({"settings": {"database_url": "postgresql://u:p@h/d"}}, ["/settings", "database_url"]),
    ({"cluster": {"kubeflow": {"url": "kubeflow:8888"}}}, ["/cluster/kubeflow/url", "pattern"]),
    ({"cluster": {"stages": {"gpus": 1}}}, ["/cluster/stages", "gpus"]),
    ({"cluster": {"per_stage": {"training": {}}}}, ["/cluster/per_stage", "training"]),
    ({"cluster": {"serving": {"placement": {"num_gpus": 65}}}}, ["/cluster/serving/placement/num_gpus", "maximum"]),
    ({"api": {"ingress": {"enabled": True}}}, ["/api/ingress/host", "minLength"]),
    ({"api": {"httpRoute": {"enabled": True}}}, ["/api/httpRoute/parentRefs", "minItems"]),
], ids=lambda one: json.dumps(one) if isinstance(one, dict) else "")
def test_a_wrong_value_is_refused_naming_it_and_the_rule(values: Values, words: list[str]) -> None:
    helm = sdk()
    with pytest.raises(helm.HelmError) as caught, helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(("values", "words"), [
    ({"bundled": {"postgresql": {"enabled": False}}}, "database.existingSecret.name"),
    ({"bundled": {"redis": {"enabled": False}}}, "broker.existingSecret.name"),
    ({"bundled": {"s3": {"enabled": False}}}, "artifacts.url"),
    ({"operator": {"namespaced": False, "watchNamespaces": ["a"]}}, "operator.namespaced"),
    ({"broker": {"url": "redis://h:6379/0"}, "worker": {"keda": {"enabled": True}}}, "worker.keda.address"),
    ({"artifacts": {"url": "s3://b", "credentials": {"accessKey": "a", "secretKey": "b", "existingSecret": "c"}}},
     "keep one"),
])
def test_values_that_contradict_each_other_are_refused_with_what_to_set(values: Values, words: str) -> None:
    helm = sdk()
    with pytest.raises(helm.HelmError, match=words):
        render(values)
