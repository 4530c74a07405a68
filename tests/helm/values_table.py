"""Brings what follows from other files up to date: `python -m tests.helm.values_table`.

Three things would otherwise drift: the settings that values.schema.json lets through (they are those of
`eyrie_api.settings`), what `cluster` may hold (it is `eyrie_api.contract.cluster`'s, and its words), and the table of
values in docs/helm_values.md (from the schema and values.yaml). The tests compare.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.settings import Settings

HELM = Path(__file__).parents[2] / "helm"
SCHEMA, VALUES = HELM / "eyrie/values.schema.json", HELM / "eyrie/values.yaml"
PAGE = HELM.parent / "docs/helm_values.md"
BEGIN, END = "<!-- values: python -m tests.helm.values_table -->\n", "<!-- end of values -->\n"

GIVEN = {"home", "host", "port", "artifacts", "chore_queue", "token", "secret_key", "oidc_client_secret",
         "database_url", "broker_url", "cluster_profile"}
"""Settings that the chart gives by itself, most of them from Secrets, or that are Secrets."""

_PROFILE = "Profile"
"""Prefix of the definitions that are the contract's."""

_LEAVES = ("image", "resources", "serviceAccount", "existingSecret", "persistence", "kubeflow", "stages", "per_stage",
           "serving", "model_cache")
"""Shapes that are one line in the table."""

_SAME = ("resources", "serviceAccount", "extraEnv", "podAnnotations", "nodeSelector", "tolerations", "affinity",
         "topologySpreadConstraints", "priorityClassName")
"""Fields that every component has."""


def settings_schema() -> dict[str, Any]:
    """The schema of `settings`."""
    kinds = {int: "integer", float: "number", bool: "boolean"}
    result = {}
    for name, field in sorted(Settings.model_fields.items()):
        if name not in GIVEN:
            words = " ".join((field.description or "").split()) or f"EYRIE_{name.upper()}; default {field.default}."
            result[name] = {"type": kinds.get(field.annotation, "string"), "description": words}  # type: ignore[arg-type]
    return {"type": "object", "additionalProperties": False, "properties": result,
            "description": "Further settings of the control plane, by the names of eyrie_api.settings."}


def profile_definitions() -> dict[str, Any]:
    """The parts of a ClusterProfile as `cluster` may hold them: what the chart fills in is not required."""
    document = ClusterProfile.model_json_schema()
    result = {_PROFILE + name: _draft_07(one) for name, one in document["$defs"].items()}
    url = result["ProfileKubeflowSpec"]["properties"]["url"]
    url["pattern"] = f"^({url['pattern'].strip('^$')})?$"  # empty: no Kubeflow
    for name in ("KubeflowSpec", "Placement", "ServingSpec"):
        result[_PROFILE + name].pop("required")
    return result


def _draft_07(schema: Any) -> Any:
    """As Helm's validator reads it, and closed: keys that match no pattern are refused."""
    if isinstance(schema, list):
        return [_draft_07(one) for one in schema]
    if isinstance(schema, str):
        return schema.replace("#/$defs/", f"#/definitions/{_PROFILE}")
    if not isinstance(schema, dict):
        return schema
    result = {name: _draft_07(one) for name, one in schema.items()
            if name != "discriminator" and not (name in ("title", "default") and not isinstance(one, dict))}
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    if "patternProperties" in result:
        result["additionalProperties"] = False
    return result


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """A schema with what it refers to laid under it."""
    for one in schema.get("allOf", []):
        schema = {**document["definitions"][one["$ref"].rpartition("/")[2]], **schema}
    return schema


def table() -> str:
    """Every value with its default and meaning, in Markdown."""
    document, values = json.loads(SCHEMA.read_text()), yaml.safe_load(VALUES.read_text())
    lines = ["| value | default | meaning |", "|---|---|---|"]

    def walk(schema: dict[str, Any], value: Any, path: str) -> None:
        schema = resolved(schema, document)
        name = path.rpartition(".")[2]
        if path.startswith(("worker.", "shards.", "operator.", "migrations.")) and name in _SAME:
            return
        inner = schema.get("properties")
        if inner is None or name in _LEAVES or path in ("settings", "images.api", "images.operator", "images.workers"):
            words = schema["description"] + (" Likewise of worker, shards and operator." if
                                             path.startswith("api.") and name in _SAME else "")
            lines.append(f"| `{path}` | `{json.dumps(value)}` | {words} |".replace("\\|", "|"))
            return
        if path:
            lines.append(f"| **`{path}`** | | {schema['description']} |")
        for key, one in inner.items():
            if key != "global":
                walk(one, value[key], f"{path}.{key}".lstrip("."))

    walk(document, values, "")
    return "\n".join(lines) + "\n"


def page_with(rows: str) -> str:
    """docs/helm_values.md with this table in it."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + rows + "\n" + END + tail


def schema_text() -> str:
    """values.schema.json with the settings of today."""
    document = json.loads(SCHEMA.read_text())
    document["properties"]["settings"] = settings_schema()
    kept = {name: one for name, one in document["definitions"].items() if not name.startswith(_PROFILE)}
    document["definitions"] = kept | profile_definitions()
    return json.dumps(document, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
    PAGE.write_text(page_with(table()))
