"""The generated definitions: what is checked in, whether an API server would take it, whether it means what we mean."""

import json
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, Field

from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import Placement
from eyrie_api.contract.resources import DraftEndpointSpec, DrafterJobSpec
from eyrie_api.planning.preflight import check
from eyrie_api.settings import Settings
from eyrie_operator.manifests.crd import NotStructural, custom_resource_definitions, render, structural
from tests.api.samples import job_body, target_directory

CHECKED_IN = Path(__file__).parents[2] / "helm" / "eyrie" / "files" / "crds"
DEFINITIONS = custom_resource_definitions()
FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "prefixItems", "patternProperties",
             "definitions", "propertyNames", "dependencies", "deprecated", "discriminator", "id", "readOnly", "xml"}


def root_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def complaints(schema: dict[str, Any], where: str) -> list[str]:
    """The rules of structural schemas, as the API server's documentation lists them."""
    found = [f"{where}: {key}" for key in schema.keys() & FORBIDDEN]
    loose = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
    if "type" not in schema and not loose:
        found.append(f"{where}: no type")
    if "properties" in schema and "additionalProperties" in schema:
        found.append(f"{where}: properties and additionalProperties")
    if schema.get("additionalProperties") is False or schema.get("uniqueItems"):
        found.append(f"{where}: additionalProperties false or uniqueItems")
    if not isinstance(schema.get("exclusiveMinimum", True), bool):
        found.append(f"{where}: exclusiveMinimum is a number")
    if any(words in schema.get("pattern", "") for words in ("(?=", "(?!", "(?<", "\\Z")):
        found.append(f"{where}: a pattern RE2 does not know")
    if schema.get("type") == "array" and "items" not in schema:
        found.append(f"{where}: no items")
    for key in schema.get("x-kubernetes-list-map-keys", ()):
        if key not in schema["items"].get("required", ()) and "default" not in schema["items"]["properties"][key]:
            found.append(f"{where}: map key {key} is optional")
    for name, one in schema.get("properties", {}).items():
        found += complaints(one, f"{where}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found += complaints(schema[name], f"{where}[{name}]")
    return found


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server fills in: defaults from the outside in, nulls where null is allowed left alone."""
    if isinstance(value, list):
        return [with_defaults(one, schema.get("items", {})) for one in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, one in schema.get("properties", {}).items():
        if name not in filled and "default" in one:
            filled[name] = json.loads(json.dumps(one["default"]))
        if name in filled:
            filled[name] = with_defaults(filled[name], one)
    return filled


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_checked_in_is_the_one_generated(name: str) -> None:
    checked_in = (CHECKED_IN / name).read_text(encoding="utf-8")
    assert checked_in == render(DEFINITIONS[name]), \
        "run: python -m eyrie_operator.manifests.crd --out helm/eyrie/files/crds"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_schema_keeps_the_rules_of_structural_schemas(name: str) -> None:
    assert complaints(root_of(DEFINITIONS[name]), name) == []


@pytest.mark.parametrize("version", ["1.27", "1.32", "1.37"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_definition_fits_the_published_schemas(name: str, version: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(render(DEFINITIONS[name])), version, strict=True)


def test_the_checker_sees_what_it_is_there_to_see() -> None:
    broken = {"type": "object", "properties": {"a": {"anyOf": []}, "b": {"type": "array"},
                                               "c": {"type": "string", "pattern": "(?=x)"}}}
    assert len(complaints(broken, "x")) == 4


@pytest.mark.parametrize(("model", "given"), [
    (DrafterJobSpec, {"job": job_body()}),
    (DrafterJobSpec, {"job": job_body(regenerate={"sampling": {"top_p": 0.9}}, benchmark={"tree": {"num_steps": 5}}),
                      "suspend": True}),
    (DraftEndpointSpec, {"target": {"model": "quickstart"}, "serve": {"port": 1234}}),
])
def test_the_server_fills_in_what_the_contract_would(model: type[BaseModel], given: dict[str, Any]) -> None:
    filled = with_defaults(given, structural(model))
    assert model.model_validate(filled) == model.model_validate(given)
    said = model.model_validate(given).model_dump(mode="json", exclude_none=True)
    said.get("job", {}).pop("labels", None)  # an empty map has no default: nothing to show
    for section, name in _DEPEND:
        said.get("job", said).get(section, {}).pop(name, None)
    assert has_all(json.loads(json.dumps(filled)), said)


_DEPEND = (("data", "max_conversations"), ("data", "held_out_fraction"), ("engine", "kind"), ("benchmark", "suites"),
           ("benchmark", "temperatures"), ("benchmark", "tree"), ("regenerate", "concurrency"),
           ("tune", "concurrencies"), ("tune", "temperatures"), ("serve", "engine"))
"""Section and field of what depends on the job (`model.depends`): the server does not fill it in."""


@pytest.mark.parametrize("fields", [{}, {"engine": {"kind": "sglang"}}])
def test_a_job_for_own_data_that_is_applied_gets_what_it_gets_by_rest(
        fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SGLANG_PROGRAM, "python -m sglang.launch_server")
    target, chats = target_directory(tmp_path / "target"), tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 100)
    given = {"target": {"model": str(target)}, "data": {"sources": [{"path": str(chats)}]}, **fields}
    applied = with_defaults({"job": given}, structural(DrafterJobSpec))
    settings = Settings(home=tmp_path)
    by_rest = check(JobSpec.model_validate(given), settings).spec
    assert check(DrafterJobSpec.model_validate(applied).job, settings).spec == by_rest
    assert [suite.path for suite in by_rest.benchmark.suites] == ["held-out"]


def has_all(filled: Any, said: Any) -> bool:
    """Whether every value is in what the server filled in, which has fields besides that JSON leaves out (`later`)."""
    if isinstance(said, dict):
        return isinstance(filled, dict) and all(name in filled and has_all(filled[name], said[name]) for name in said)
    if isinstance(said, list):
        return len(filled) == len(said) and all(map(has_all, filled, said))
    return bool(filled == said)


def test_bounds_patterns_and_words_of_the_contract_are_kept() -> None:
    job = root_of(DEFINITIONS["drafterjobs.yaml"])["properties"]["spec"]["properties"]["job"]["properties"]
    decay = job["train"]["properties"]["step_decay"]
    assert (decay["minimum"], decay["exclusiveMinimum"], decay["maximum"], decay["default"]) == (0.0, True, 1.0, 0.8)
    assert job["regenerate"]["properties"]["base_url"]["pattern"] == "^https?://"
    assert job["regenerate"]["properties"]["base_url"]["nullable"] is True
    assert "draft vocabulary" not in job["train"]["description"]
    assert job["train"]["properties"]["ttt_length"]["description"].startswith("Drafter steps unrolled")
    assert job["sweep"]["properties"]["axes"]["items"]["properties"]["values"]["items"] == {
        "x-kubernetes-preserve-unknown-fields": True}
    assert "maximum" not in job["data"]["properties"]["seed"], "beyond what a float can tell apart"


def test_conditions_are_a_map_by_type_so_that_two_writers_can_own_one_each() -> None:
    for definition in DEFINITIONS.values():
        conditions = root_of(definition)["properties"]["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        assert {"lastTransitionTime", "observedGeneration"} <= conditions["items"]["properties"].keys()


def test_the_status_is_filled_in_by_nobody() -> None:
    for definition in DEFINITIONS.values():
        assert "default:" not in yaml.dump(root_of(definition)["properties"]["status"])


def test_the_spec_of_a_job_is_immutable_where_the_server_knows_rules() -> None:
    spec = root_of(DEFINITIONS["drafterjobs.yaml"])["properties"]["spec"]
    assert [one["rule"] for one in spec["x-kubernetes-validations"]] == ["self.job == oldSelf.job"]


def test_the_rules_for_draft_trees_are_the_models() -> None:
    rules = [one["rule"] for one in structural(DraftTreeShape)["x-kubernetes-validations"]]
    for steps in (1, 2, 4):
        for top_k in (1, 2, 3):
            for nodes in range(2, 30):
                for verification in ("target", "block"):
                    values = {"num_steps": steps, "top_k": top_k, "num_draft_tokens": nodes,
                              "verification": verification}
                    assert all(holds(rule, values) for rule in rules) == accepts(DraftTreeShape, values), values


def holds(rule: str, values: dict[str, Any]) -> bool:
    """These rules are Python but for two operators."""
    for name, value in values.items():
        rule = rule.replace(f"self.{name}", repr(value))
    return bool(eval(rule.replace("||", " or ")))


def accepts(model: type[BaseModel], values: dict[str, Any]) -> bool:
    try:
        model.model_validate(values)
    except ValueError:
        return False
    return True


def test_a_choice_that_may_be_left_out_names_no_null() -> None:
    class Choice(BaseModel):
        effect: Literal["a", "b"] | None = None

    field = structural(Choice)["properties"]["effect"]
    assert field == {"type": "string", "enum": ["a", "b"]}
    assert "null" not in [line.strip("- \n") for name in DEFINITIONS for line in
                          (CHECKED_IN / name).read_text(encoding="utf-8").splitlines()]


def test_a_tagged_union_becomes_one_object_with_rules() -> None:
    work = structural(Placement)["properties"]["work"]
    assert work["nullable"] is True
    assert work["required"] == ["kind"]
    assert {"claim", "url", "mount_path"} <= work["properties"].keys()
    assert {"rule": "self.kind != 's3' || has(self.url)", "message": "url is required"} in work[
        "x-kubernetes-validations"]
    assert complaints(work, "work") == []


def test_what_cannot_be_said_is_refused_rather_than_left_out() -> None:
    class Either(BaseModel):
        value: int | str = Field(1)

    with pytest.raises(NotStructural, match="union of 2 kinds"):
        structural(Either)


def test_a_definition_fits_into_the_annotation_of_client_side_apply() -> None:
    assert all(len(json.dumps(one)) < 200_000 for one in DEFINITIONS.values())


def test_every_field_of_a_job_is_there() -> None:
    job = root_of(DEFINITIONS["drafterjobs.yaml"])["properties"]["spec"]["properties"]["job"]["properties"]
    assert job.keys() == JobSpec.model_fields.keys()
