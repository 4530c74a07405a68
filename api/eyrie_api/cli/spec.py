"""Builds a job spec from flags: a file, then --target, --data, drafters and --prompts, then --set, each overriding the
previous.

`--set train.learning_rate=5e-4` takes its value as YAML, so that numbers, lists and booleans have their YAML meaning.
The document is validated against the contract before any request, and errors name the field.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from eyrie_api import yaml_text
from eyrie_api.contract.benchmark import QUICKSTART_SUITES
from eyrie_api.contract.families import AUTO, FAMILIES, sglang_families
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.targets import QUICKSTART
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sweep import expand
from eyrie_api.unknown_fields import unknown_field_hint

_PROMPTS = 32
"""Of a file of --prompts: as many as the shipped suites have together."""

_SHIPPED_PROMPTS, _SHIPPED_BUDGET_S = 2, 8.0
"""Prompts of each shipped suite, and seconds of racing: with the shipped target a certificate takes two minutes."""

_MEASURED_ROWS, _MEASURED_TOKENS, _MEASURED_S = 64, 64, 30.0
"""Of the job that times rounds before anything is trained: conversations, tokens of an answer, seconds of racing."""


def build_job(*, file: Path | None = None, name: str | None = None, target: str | None = None,
              revision: str | None = None, dtype: str | None = None, data: Sequence[str] = (),
              drafters: Sequence[str] = (), prompts: Sequence[str] = (), settings: Sequence[str] = ()) -> JobSpec:
    """The job that a command line describes. Raises InvalidInput naming the flag or field."""
    document = read_document(file) if file is not None else {}
    if document.get("kind") == "DrafterJob":  # an object for Kubernetes, which holds the job below spec.job
        job = document["spec"].get("job") if isinstance(document.get("spec"), dict) else None
        if not isinstance(job, dict):
            raise InvalidInput("the object of kind DrafterJob has no mapping spec.job", "give it a job below spec.job")
        document = job
    if name is not None:
        document["name"] = name
    for field, value in (("model", target), ("revision", revision), ("dtype", dtype)):
        if value is not None:
            assign(document, f"target.{field}", value)
    if data:
        assign(document, "data.sources", [{"path": path} for path in data])
    if drafters:
        assign(document, "drafters", list(drafters))
    if prompts:
        assign(document, "benchmark.suites", [_suite(path, number) for number, path in enumerate(prompts, 1)])
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        if not equals or not dotted:
            raise InvalidInput(f"--set {setting!r} has no field=value", "write it like --set train.epochs=3")
        try:
            value = yaml_text.load(text)
        except yaml.YAMLError:
            raise InvalidInput(f"--set {setting!r}: the value is not YAML",
                               "quote it, or write lists as [1, 2]") from None
        assign(document, dotted.strip(), value)
    if "model" not in (document.get("target") or {}):
        raise InvalidInput("no target was given", "give --target <Hugging Face directory, Hub id, or quickstart>")
    if not (document.get("data") or {}).get("sources") and not document.get("drafters"):
        raise InvalidInput("no conversations were given, and no drafters",
                           "give --data <file.jsonl, file.parquet, Hub data set, or quickstart>; eyrie certify takes "
                           "drafters that were trained elsewhere")
    return validate(document)


def _suite(path: str, number: int) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "-", Path(path).name.partition(".")[0].lower()).strip("-")[:40].strip("-")
    return {"name": name or f"prompts-{number}", "path": path, "max_prompts": _PROMPTS}


def certification(job: JobSpec, *, promote: bool) -> JobSpec:
    """The job of `eyrie certify`: nothing is served unless it is promoted, and n-gram look-up, which needs no drafter,
    is not tuned. On the shipped target it is small enough for two minutes. Fields that it sets already stay. Raises
    InvalidInput, also for a job that trains.
    """
    if job.trains:
        raise InvalidInput("no drafter was given, and eyrie certify trains none",
                           "give directories or Hub ids of drafters, or `drafters` in the file; eyrie train trains one")
    document = {"name": "certify"} | job.model_dump(mode="json", exclude_unset=True)
    fields: list[tuple[str, str, Any]] = [
        ("tune", "ngram", any(rival.method == "ngram" for rival in job.rivals)),
        ("promotion", "mode", "auto" if promote else "never"), ("serve", "enabled", promote)]
    if job.target.model == QUICKSTART and job.engine.kind == "embedded":
        fields += [("tune", "budget_s", _SHIPPED_BUDGET_S), ("tune", "num_steps", [3, 5]), ("tune", "top_k", [1]),
                   ("tune", "max_prompts", 4), ("prove", "requests", 8), ("prove", "most_pairs", 60),
                   ("prove", "max_new_tokens", 32), ("prove", "parity_prompts", 4),
                   ("benchmark", "temperatures", [0.0]), ("benchmark", "max_new_tokens", 24),
                   ("benchmark", "warmup_prompts", 1)]
        if "suites" not in job.benchmark.model_fields_set:
            fields.append(("benchmark", "suites", [suite.model_copy(update={
                "max_prompts": _SHIPPED_PROMPTS}).model_dump(mode="json") for suite in QUICKSTART_SUITES]))
    for section, field, value in fields:
        document.setdefault(section, {}).setdefault(field, value)
    return validate(document)


def measurement(job: JobSpec) -> JobSpec:
    """The job of `eyrie plan --measure`: the first candidate of `job` after one training step, for the seconds of its
    rounds in the job's engine, which do not depend on what it has learned. Nothing is promoted. Raises InvalidInput for
    a job that trains nothing.
    """
    if not job.trains:
        raise InvalidInput("--measure times the rounds of a drafter that is to be trained, and this job trains none",
                           "leave --measure out; eyrie certify measures drafters that exist")
    document = job.model_dump(mode="json", exclude_unset=True, exclude={"sweep", "rivals"})
    known = () if AUTO in job.sweep.families else job.sweep.families  # the server knows which it trains
    first = expand(job.model_copy(update={"sweep": job.sweep.model_copy(update={"families": known})}))[0]
    document["drafter"] = first.drafter.model_dump(mode="json", exclude_unset=True)
    fields: dict[str, dict[str, Any]] = {
        "data": {"max_conversations": min(_MEASURED_ROWS, job.data.max_conversations)},
        "regenerate": {"max_new_tokens": min(_MEASURED_TOKENS, job.regenerate.max_new_tokens)},
        "train": {"max_steps": 1, "num_checkpoints": 1},
        "benchmark": {"temperatures": [0.0], "concurrencies": [1], "max_new_tokens": _MEASURED_TOKENS,
                      "repeats": 1, "suites": [suite.model_copy(update={"max_prompts": 2}).model_dump(mode="json")
                                               for suite in job.benchmark.suites]},
        "tune": {"ngram": False, "max_prompts": 4, "temperatures": [0.0], "budget_s": _MEASURED_S},
        "prove": {"requests": 8, "most_pairs": 8, "hardware": None},
        "promotion": {"mode": "never", "must_beat": "incumbent"}, "serve": {"enabled": False}}
    for section, values in fields.items():
        document.setdefault(section, {}).update(values)
    return validate(document | {"name": f"{job.name or 'plan'}-measured"})


def comparison(job: JobSpec, families: Sequence[str] = (), rivals: Sequence[str] = ()) -> JobSpec:
    """The job with a candidate of every family, and rivals, n-gram look-up and no drafter beside them. Fields that it
    sets already stay. Raises InvalidInput.

    families   default: those that the job's engine can serve, without experimental ones
    """
    document = {"name": "compare"} | job.model_dump(mode="json", exclude_unset=True)
    known = sglang_families() if job.engine.kind == "sglang" else tuple(FAMILIES)
    trained = families or [name for name in known if FAMILIES[name].quickstart_speedup is not None]
    for section, field, value in (("sweep", "families", list(trained)), ("train", "num_checkpoints", 1),
                                  ("benchmark", "concurrencies", [1, 4]), ("serve", "enabled", False)):
        document.setdefault(section, {}).setdefault(field, value)
    named = [*document.get("rivals", ()), *({"path": path} for path in rivals)]
    methods = {rival.get("method") for rival in named}
    document["rivals"] = [*named, *({"method": method} for method in ("ngram", "off") if method not in methods)]
    return validate(document)


def read_document(file: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file of --file. Raises InvalidInput."""
    try:
        document = yaml_text.load(file.read_text())
    except FileNotFoundError:
        raise InvalidInput(f"--file {file} does not exist",
                           "give the path of a file with `target:` and `data:`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--file {file} cannot be read: {error}", "give a readable text file") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"--file {file} is not YAML: {' '.join(str(error).split())}",
                           "correct it, or give JSON") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"--file {file} holds a {type(document).__name__}, not a mapping",
                           "begin it with `target:` and `data:`")
    return document


def assign(document: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested mappings, creating them as needed. Raises InvalidInput where a section is a value."""
    *sections, last = dotted.split(".")
    place = document
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise InvalidInput(f"{dotted}: {section} is not a section", "the server's /docs describes every field")
    place[last] = value


def validate(document: dict[str, Any]) -> JobSpec:
    """The document as a job spec. Raises InvalidInput with every wrong field."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        problems, hints = [], []
        for problem in error.errors(include_url=False):
            where = ".".join(str(step) for step in problem["loc"]) or "job"
            kind = problem["type"]
            got = "" if kind in ("missing", "extra_forbidden") or where == "job" else f" (got {problem['input']!r})"
            problems.append(f"{where}: {rule_of(problem)}{got}")
            if kind == "extra_forbidden":
                hints.append((where, unknown_field_hint(problem["loc"])))
        hint = hints[0][1] if len(hints) == 1 else "; ".join(f"{where}: {text}" for where, text in hints)
        raise InvalidInput("; ".join(problems), hint or "every field is described at the server's /docs") from None
