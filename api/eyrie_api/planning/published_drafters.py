"""Checks of drafters that a job names (`rivals`, `drafter.init_from`), from their config.json alone.

Only what is readable here is checked; the stage that reads the drafter runs the whole validator. A Hub id that is not
in the cache is left to that stage.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import TargetSpec, is_hub_id
from eyrie_api.errors import Forbidden, InvalidInput, NotFound
from eyrie_api.planning.facts import Facts, local_path, read_config, target_dir
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.sglang_support import require_mtp_architecture

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OF_JOB = "job:"


def with_drafters_of_jobs(spec: JobSpec, job_of: Callable[[str], Job], home: Path) -> JobSpec:
    """The job with the directory of a job's best checkpoint in place of `drafter.init_from: job:ID`.

    job_of   a job that the submitter may read, by id; raises NotFound or Forbidden for others

    Raises InvalidInput for a job that is not there, or has no checkpoint of its own to continue from.
    """
    def resolved(named: JsonValue) -> JsonValue:
        if not isinstance(named, str) or not named.startswith(_OF_JOB):
            return named
        try:
            job = job_of(named.removeprefix(_OF_JOB))
        except (NotFound, Forbidden):
            raise InvalidInput(f"drafter.init_from {named!r}: there is no such job, or not in your project",
                               "list the jobs you may read") from None
        best = job.status.best
        if best is None or best.rival or best.tree is None:
            what = "has measured no checkpoint" if best is None else f"has not trained its best, {best.checkpoint!r}"
            raise InvalidInput(f"drafter.init_from {named!r}: the job {what}",
                               "name a job that has trained and measured a drafter, or a drafter's directory")
        trained = home.absolute() / "jobs" / job.id / "stages" / "train" / best.candidate
        return str(trained / "checkpoints" / best.checkpoint)

    axes = tuple(axis.model_copy(update={"values": tuple(map(resolved, axis.values))})
                 if axis.field == "drafter.init_from" else axis for axis in spec.sweep.axes)
    return spec.model_copy(update={
        "drafter": spec.drafter.model_copy(update={"init_from": resolved(spec.drafter.init_from)}),
        "sweep": spec.sweep.model_copy(update={"axes": axes})})


def check_published_drafters(job: ResolvedJob, facts: Facts, stored: Path | None = None) -> None:
    """Check them against the target.

    stored   directory whose files an artifact store has: a drafter below it that is not here is left to the stage

    Raises InvalidInput for a drafter that is missing or whose config.json is of another target, naming both values;
    UnsupportedTarget for MTP layers that SGLang does not draft with."""
    if facts.target is not None and any(rival.method == "nextn" for rival in job.rivals):
        require_mtp_architecture(facts.config)
    for candidate in job.candidates:
        if candidate.drafter.init_from is not None and not FAMILIES[candidate.drafter.family].continues:
            raise InvalidInput(f"drafter.init_from is set, and training of {candidate.drafter.family} drafters cannot "
                               "continue from a checkpoint", "leave it out, or train one of "
                               + ", ".join(name for name, row in FAMILIES.items() if row.continues))
    named = [(f"rivals: {rival.path!r}", rival.path, rival.revision) for rival in job.rivals if rival.path is not None]
    heads = dict.fromkeys(candidate.drafter.head for candidate in job.candidates if candidate.drafter.head is not None)
    named += [(f"drafter.init_from {head.path!r}", head.path, head.revision) for head in heads]
    for field, path, revision in named:
        if stored is not None and Path(path).is_relative_to(stored) and not Path(path).exists():
            continue
        directory = _directory(field, path, revision)
        if directory is not None and facts.sizes is not None:
            _check_sizes(field, read_config(directory), facts.sizes)


def _directory(field: str, path: str, revision: str | None) -> Path | None:
    directory = local_path(path)
    if directory is None and is_hub_id(path):
        return target_dir(TargetSpec(model=path, revision=revision))  # None: not in the cache
    if directory is None or not (directory / "config.json").is_file():
        raise InvalidInput(f"{field} is not a directory with config.json on the server",
                           "give the directory of a drafter, or a Hub id org/name")
    return directory


def _check_sizes(field: str, config: Mapping[str, Any], facts: TargetFacts) -> None:
    layer = config.get("transformer_layer_config")  # the speculators format nests the sizes
    sizes = layer if isinstance(layer, Mapping) else config
    is_model = config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" not in config
    wanted = {"vocab_size": facts.vocab_size}
    if not is_model:  # a draft model of its own has a width of its own, and an authors' EAGLE-1 its target's
        wanted["hidden_size"] = facts.hidden_size
    for name, of_target in wanted.items():
        size = config.get("target_hidden_size") or sizes.get(name) if name == "hidden_size" else sizes.get(name)
        if isinstance(size, int) and size != of_target:
            raise InvalidInput(f"{field} is for a target of {name} {size}, and this target has {of_target}",
                               "name a drafter of this target")
    nested = config.get("eagle_config")
    inner = nested.get(_LAYER_IDS) if isinstance(nested, Mapping) else None
    of_dflash = config.get("dflash_config")
    ids = inner or (of_dflash.get("target_layer_ids") if isinstance(of_dflash, Mapping) else None) or ()
    beyond = [layer for layer in ids if isinstance(layer, int) and layer >= facts.num_layers]
    if beyond:
        raise InvalidInput(f"{field} reads layers {beyond}, and this target has {facts.num_layers} layers",
                           "name a drafter of this target")
