"""CustomResourceDefinitions generated from the pydantic models. Pure: no cluster, no kubernetes library.

pydantic generates JSON Schema; Kubernetes requires *structural* schemas. They differ in five ways:

- no `$ref`: every model is written out where it is used (the models have no cycles);
- no `anyOf`: an optional field has `nullable: true`; a tagged union becomes one object with the fields of all variants,
  and CEL rules state which fields each variant requires;
- `exclusiveMinimum` is a flag beside `minimum`, `const` is an enum with one value, tuples are lists;
- no `additionalProperties: false`: the server prunes unknown fields. Newer kubectl and servers warn about them; our
  REST API rejects them;
- defaults are included, and nested ones omit what the server fills in from the defaults of inner fields, so that
  `kubectl get -o yaml` shows the values a job runs with; those that depend on the job (`model.depends`) are left out,
  so that a job applied here gets what the same job gets by REST.

Constraints between fields, which the models check and JSON Schema cannot express, are repeated in CEL (`_RULES`) for
servers that support it (1.25 and newer). Older servers drop the rules; the operator then rejects the object in its
status. `structural` raises for a schema that cannot be expressed, instead of omitting a constraint.

    python -m eyrie_operator.manifests.crd --out helm/eyrie/files/crds
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from eyrie_api.contract.model import DEPENDS
from eyrie_api.contract.resources import (
    GROUP,
    VERSION,
    DraftEndpointSpec,
    DraftEndpointStatus,
    DrafterJobSpec,
    DrafterJobStatus,
)

Schema = dict[str, Any]

# The server compares numbers as floats, which are not exact beyond 2**53: larger bounds are left out.
_EXACT = 2**53
_KEPT = ("type", "format", "pattern", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
         "maxProperties", "minProperties", "multipleOf", "description", "required", "uniqueItems")
_MET = {"title", "$defs", "$ref", "properties", "items", "prefixItems", "additionalProperties", "patternProperties",
        "propertyNames", "default", "anyOf", "oneOf", "allOf", "const", "discriminator", "exclusiveMinimum",
        "exclusiveMaximum"}
"""Keywords that this module translates, omits or rejects."""

_RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    # By model: rule, message. Optional fields are tested with has(); all others have defaults.
    "DrafterJobSpec": (
        ("self.job == oldSelf.job", "spec.job cannot be changed: apply a DrafterJob of another name"),
    ),
    "DraftEndpointSpec": (
        ("self.target == oldSelf.target", "spec.target cannot be changed: a URL must not change its model under its "
                                          "users; apply a DraftEndpoint of another name"),
    ),
    "JobSpec": (
        ("self.benchmark.tree.num_steps <= self.train.ttt_length + 4",
         "benchmark.tree.num_steps is far beyond train.ttt_length: raise ttt_length or lower num_steps"),
    ),
    "RegenerateSpec": (
        ("self.engine == 'embedded' || has(self.base_url) || (has(self.endpoints) && size(self.endpoints) > 0)",
         "base_url is required unless engine is embedded: give the endpoint's URL including /v1"),
    ),
    "DrafterSpec": (
        ("!(self.fc_norm && self.norm_before_fc)",
         "fc_norm and norm_before_fc are both true: no engine applies both"),
    ),
    "DraftTreeShape": (
        ("self.top_k != 1 || self.num_draft_tokens == self.num_steps + 1",
         "with top_k 1 num_draft_tokens must be num_steps + 1"),
        ("self.num_draft_tokens >= self.num_steps + 1",
         "num_draft_tokens cannot hold one path of num_steps: give at least num_steps + 1"),
        ("self.num_draft_tokens <= 1 + self.top_k + (self.num_steps - 1) * self.top_k * self.top_k",
         "num_draft_tokens is more than such a tree can grow: at most 1 + top_k + (num_steps - 1) * top_k * top_k"),
        ("self.top_k == 1 || self.verification == 'target'", "verification is of chains: set top_k to 1, or omit it"),
    ),
}

_LIST_KEYS: Mapping[str, tuple[str, ...]] = {"ResourceCondition": ("type",), "ResourceRevision": ("number",)}
"""By item model, the keys of `x-kubernetes-list-type: map`: server-side apply merges such lists item by item."""


class NotStructural(ValueError):
    """A structural schema cannot express the model."""


def custom_resource_definitions() -> dict[str, Schema]:
    job = _definition(
        kind="DrafterJob", plural="drafterjobs", short="dj", spec=DrafterJobSpec, status=DrafterJobStatus,
        description="Train, choose, tune and serve a speculative-decoding drafter for one target.",
        columns=(
            ("Phase", "string", ".status.phase", 0, "What it is doing."),
            ("Reason", "string", '.status.conditions[?(@.type=="Succeeded")].reason', 0, "Why it ended as it did."),
            ("Target", "string", ".spec.job.target.model", 0, "The model it trains for."),
            ("Speedup", "number", ".status.best.speedup", 0, "Of the best drafter, over none."),
            ("Age", "date", ".metadata.creationTimestamp", 0, ""),
            ("Job", "string", ".status.job_id", 1, "Its id at the REST API."),
            ("Tau", "number", ".status.best.tau", 1, "Tokens per target pass, bonus token included."),
            ("Verdict", "string", ".status.verdict", 1, "Whether it was promoted."),
            ("Endpoint", "string", ".status.endpoint", 1, "Where it serves."),
            ("Attempt", "integer", ".status.attempt", 1, "Counts retries."),
        ))
    endpoint = _definition(
        kind="DraftEndpoint", plural="draftendpoints", short="de", spec=DraftEndpointSpec, status=DraftEndpointStatus,
        description="A stable URL for a target, served with the best drafter there is for it.",
        columns=(
            ("Serving", "string", '.status.conditions[?(@.type=="Serving")].status', 0, "Whether it answers."),
            ("Reason", "string", '.status.conditions[?(@.type=="Serving")].reason', 0, ""),
            ("Target", "string", ".spec.target.model", 0, "The model it serves."),
            ("URL", "string", ".status.url", 0, "OpenAI-compatible."),
            ("Age", "date", ".metadata.creationTimestamp", 0, ""),
            ("Revision", "integer", ".status.active_revision", 1, "What serves."),
            ("Candidate", "integer", ".status.candidate_revision", 1, "What is being tried."),
            ("Desired", "string", ".spec.desired", 1, "on or off."),
        ))
    return {"drafterjobs.yaml": job, "draftendpoints.yaml": endpoint}


def _definition(*, kind: str, plural: str, short: str, spec: type[BaseModel], status: type[BaseModel], description: str,
                columns: tuple[tuple[str, str, str, int, str], ...]) -> Schema:
    root: Schema = {
        "type": "object", "description": description, "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"},
            "spec": structural(spec), "status": structural(status, defaults=False),
        },
    }
    printed = [{"name": name, "type": of, "jsonPath": path} | ({"priority": priority} if priority else {}) |
               ({"description": words} if words else {}) for name, of, path, priority, words in columns]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(),
                      "shortNames": [short], "categories": ["all", "eyrie"]},
            "versions": [{
                "name": VERSION, "served": True, "storage": True, "subresources": {"status": {}},
                "additionalPrinterColumns": printed, "schema": {"openAPIV3Schema": root},
            }],
        },
    }


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The structural schema of a model. A status is generated without `defaults`: the server must not fill it in."""
    document = model.model_json_schema(by_alias=True)
    schema: Schema = _unmarked(_Writer(document.get("$defs", {}), defaults).write(document))
    return schema


def _unmarked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_unmarked(item) for item in schema]
    if isinstance(schema, dict):
        return {name: _unmarked(part) for name, part in schema.items() if name != DEPENDS}
    return schema


class _Writer:
    """Converts the schemas of one JSON Schema document."""

    def __init__(self, definitions: Mapping[str, Schema], defaults: bool) -> None:
        self._definitions, self._defaults = definitions, defaults

    def write(self, source: Schema) -> Schema:
        source, nullable = self._resolve(source)
        if "oneOf" in source:
            source = self._merged_union(source)
        unknown = set(source) - set(_KEPT) - _MET - {"x-kubernetes-validations", DEPENDS}
        if unknown or "anyOf" in source or "allOf" in source or "prefixItems" in source:
            what = sorted(unknown) or "a union, or a tuple of unlike values,"
            raise NotStructural(f"{source.get('title', source)!s}: {what} cannot be expressed in a structural schema")
        target: Schema = {key: source[key] for key in _KEPT if key in source}
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive in source:
                target[bound], target[exclusive] = source[exclusive], True
            if bound in target and abs(target[bound]) > _EXACT:
                del target[bound]
        if target.get("type") == "integer":
            target["format"] = "int64"
        if "const" in source:
            target["enum"] = [source["const"]]
        # An optional enum is not nullable, clients omit the field instead: a server of 1.20 rejects a definition with
        # null among the values, and without it every server rejects null even where the field is nullable.
        if nullable and "enum" not in target:
            target["nullable"] = True
        if "type" not in target:  # any JSON value
            target["x-kubernetes-preserve-unknown-fields"] = True
            return target
        if target["type"] == "array":
            target["items"] = self.write(source["items"])
            key = _LIST_KEYS.get(self._resolve(source["items"])[0].get("title", ""))
            if key:
                target |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(key)}
        elif target["type"] == "object":
            if "properties" in source:
                target["properties"] = {name: self.write(part) for name, part in source["properties"].items()}
                if not self._defaults and "required" in target:  # nulls of a status are not stored
                    target["required"] = [name for name in target["required"]
                                          if not self._resolve(source["properties"][name])[1]]
            elif "patternProperties" in source:  # the keys' pattern cannot be expressed
                target["additionalProperties"] = self.write(next(iter(source["patternProperties"].values())))
            elif isinstance(source.get("additionalProperties"), dict):
                target["additionalProperties"] = self.write(source["additionalProperties"])
            else:
                target["x-kubernetes-preserve-unknown-fields"] = True
            rules = [*source.get("x-kubernetes-validations", ()),
                     *({"rule": rule, "message": message} for rule, message in _RULES.get(source.get("title", ""), ()))]
            if rules and self._defaults:  # a status is written by the operator: rules are for users' input
                target["x-kubernetes-validations"] = rules
        if self._defaults and source.get("default") is not None:
            # What a default that depends on the job would be, until `_smallest` has left it out of its section's.
            target[DEPENDS if DEPENDS in source else "default"] = _smallest(source["default"], target)
        return target

    def _resolve(self, source: Schema) -> tuple[Schema, bool]:
        """Resolve references and optional types; keywords next to a `$ref` override those of its target."""
        nullable = False
        while True:
            if "$ref" in source:
                name = source["$ref"].rpartition("/")[2]
                source = {**self._definitions[name], **{k: v for k, v in source.items() if k != "$ref"}}
                continue
            options = source.get("anyOf")
            if options is None:
                return source, nullable
            real = [option for option in options if option.get("type") != "null"]
            if len(real) != 1 or len(real) == len(options):
                raise NotStructural(f"{source.get('title')}: a union of {len(real)} kinds; give it a discriminator")
            nullable = True
            rest = {key: value for key, value in source.items() if key != "anyOf"}
            source = {**real[0], **rest}

    def _merged_union(self, source: Schema) -> Schema:
        """A tagged union as one object: the tag, required, the fields of every variant, and rules per variant."""
        tag = source.get("discriminator", {}).get("propertyName")
        if tag is None:
            raise NotStructural(f"{source.get('title')}: a union without a discriminator")
        variants = [self._resolve(variant)[0] for variant in source["oneOf"]]
        tags = [variant["properties"][tag].get("const") for variant in variants]
        properties: Schema = {tag: {"type": "string", "enum": tags}}
        rules: list[dict[str, str]] = []
        for value, variant in zip(tags, variants, strict=True):
            for name, schema in variant["properties"].items():
                if name == tag:
                    continue
                if name in properties and properties[name] != schema:
                    raise NotStructural(f"{variant.get('title')}.{name}: differs from that field of another variant")
                # The server would fill in the default of one variant for all of them.
                properties[name] = {key: part for key, part in schema.items() if key != "default"}
            rules += [{"rule": f"self.{tag} != '{value}' || has(self.{name})", "message": f"{name} is required"}
                      for name in variant.get("required", ()) if name != tag]
        rest = {key: value for key, value in source.items() if key in ("description", "default", "title")}
        return {"type": "object", "properties": properties, "required": [tag], **rest,
                "x-kubernetes-validations": rules}


def _smallest(value: Any, schema: Schema) -> Any:
    """The default without nulls, and without values that defaults of inner fields fill in or that depend on the job."""
    if not isinstance(value, dict):
        return [_smallest(item, schema.get("items", {})) for item in value] if isinstance(value, list) else value
    small = {}
    for name, part in value.items():
        field = schema.get("properties", {}).get(name, {})
        reduced = _smallest(part, field)
        if part is not None and not any(key in field and field[key] == reduced for key in ("default", DEPENDS)):
            small[name] = reduced
    return small


class _Dumper(yaml.SafeDumper):
    """Writes no aliases: repeated values are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(definition: Schema) -> str:
    """The YAML text as it is checked in."""
    head = "# Made by `python -m eyrie_operator.manifests.crd` from the contract; a test compares. Do not edit.\n"
    return head + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=116, default_flow_style=False)


def main() -> None:
    """Write the definitions."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_operator.manifests.crd", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Directory, for example helm/eyrie/files/crds.")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, definition in custom_resource_definitions().items():
        (out / name).write_text(render(definition), encoding="utf-8")


if __name__ == "__main__":
    main()
