"""values.schema.json: strict, described, in step with values.yaml; wrong values are refused in words."""

import json
from typing import Any

import jsonschema
import pytest

from eyrie_api.settings import Settings
from tests.helm.rendering import CHART, Values, from_file, render, sdk

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
OWN = {"home", "host", "port", "artifacts", "chore_queue"}
"""Settings the chart gives by itself."""
SECRET = {"token", "database_url", "broker_url"}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    for one in schema.get("allOf", []):
        schema = {**SCHEMA["definitions"][one["$ref"].rpartition("/")[2]], **schema}
    return schema


def test_the_defaults_pass() -> None:
    jsonschema.validate(from_file("values.yaml"), SCHEMA)


def test_every_default_is_described_and_everything_described_has_a_default() -> None:
    def compare(value: object, schema: dict[str, Any], path: str) -> None:
        schema = resolved(schema)
        assert len(schema["description"]) > 3, path
        properties = schema.get("properties")
        if properties is None or not isinstance(value, dict):
            return
        assert schema["additionalProperties"] is False, path
        for name, one in value.items():
            assert name in properties, f"{path}.{name}"
            compare(one, properties[name], f"{path}.{name}")
        assert path == ".settings" or set(properties) - set(value) <= {"global", "claims", "requests", "limits"}, path

    compare(from_file("values.yaml"), SCHEMA, "")


def test_settings_that_may_be_given_are_those_of_the_control_plane() -> None:
    assert set(SCHEMA["properties"]["settings"]["properties"]) == set(Settings.model_fields) - OWN - SECRET


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
    ({"operator": {"watchNamespaces": ["a"]}}, "operator.namespaced"),
    ({"broker": {"url": "redis://h:6379/0"}, "worker": {"keda": {"enabled": True}}}, "worker.keda.address"),
    ({"artifacts": {"url": "s3://b", "credentials": {"accessKey": "a", "secretKey": "b", "existingSecret": "c"}}},
     "keep one"),
])
def test_values_that_contradict_each_other_are_refused_with_what_to_set(values: Values, words: str) -> None:
    helm = sdk()
    with pytest.raises(helm.HelmError, match=words):
        render(values)
