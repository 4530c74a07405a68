"""Checks of drafters that a job names (`drafters`, `rivals`, `drafter.init_from`), from config.json and the headers of
weights.

The rules are those of the stage that reads the drafter (`planning.drafter_forms`), which adds what values of tensors,
digests and cards decide. A Hub id that is not in the cache, and a job whose target is not here, are left to that stage.
"""

import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path

from eyrie_api.contract.drafter import PublishedDrafter
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Job
from eyrie_api.contract.targets import TargetSpec, is_hub_id
from eyrie_api.errors import Forbidden, InvalidInput, NotFound, UnsupportedTarget
from eyrie_api.planning.drafter_forms import Form, convert, form_faults, require_agreement
from eyrie_api.planning.drafter_rules import Header, Target, TargetSizes, fit_rules
from eyrie_api.planning.eagle3_rules import own_engine_rules
from eyrie_api.planning.facts import Facts, local_path, target_dir
from eyrie_api.planning.sglang_support import require_mtp_architecture, require_mtp_layer
from eyrie_api.planning.target_config import end_token_ids, language_model
from eyrie_api.planning.target_files import SINGLE, read_header, read_object, stored_tensors, weights_are_here

_CONFIG, _PICKLED = "config.json", "pytorch_model.bin"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I64": "int64",
               "I32": "int32", "BOOL": "bool"}
"""Of safetensors headers, as torch names them."""

_PARAMETERS = (".weight", ".bias", ".inv_freq", "d2t", "t2d")
_MAX_PICKLE_BYTES = 1 << 24
_OF_JOB = "job:"


def with_drafters_of_jobs(spec: JobSpec, job_of: Callable[[str], Job], home: Path) -> JobSpec:
    """The job with the directory of a job's best checkpoint in place of `drafter.init_from: job:ID`.

    job_of   a job that the submitter may read, by id; raises NotFound or Forbidden for others

    Raises InvalidInput for a job that is not there, or has no checkpoint of its own to continue from.
    """
    def resolved(field: str, named: str) -> str:
        if not field.endswith("drafter.init_from") or not named.startswith(_OF_JOB):
            return named
        try:
            job = job_of(named.removeprefix(_OF_JOB))
        except (NotFound, Forbidden):
            raise InvalidInput(f"drafter.init_from {named!r}: there is no such job, or not in your project",
                               "list the jobs you may read") from None
        best = job.status.best
        if best is None or best.rival or best.tree is None or not job.spec.trains:
            what = "has measured no checkpoint" if best is None else f"has not trained its best, {best.checkpoint!r}"
            raise InvalidInput(f"drafter.init_from {named!r}: the job {what}",
                               "name a job that has trained and measured a drafter, or a drafter's directory")
        trained = home.absolute() / "jobs" / job.id / "stages" / "train" / best.candidate
        return str(trained / "checkpoints" / best.checkpoint)

    return spec.with_paths(resolved)


def check_published_drafters(job: ResolvedJob, facts: Facts, stored: Path | None = None) -> None:
    """Check them against the target.

    stored   directory whose files an artifact store has: a drafter below it that is not here is left to the stage

    Raises InvalidInput, with field and path, for a drafter that is missing, whose form no family reads, that breaks a
    rule of its family, is of another target, or is not what the job trains; UnsupportedTarget for MTP layers that
    SGLang does not draft with."""
    if facts.target is not None and any(drafter.method == "nextn" for drafter in job.brought):
        require_mtp_architecture(facts.config)
    if facts.target is not None and any(FAMILIES[family].of_target for family in job.families):
        require_mtp_layer(facts.config, stored_tensors(facts.target) if weights_are_here(facts.target) else None)

    def checked(drafter: str, path: str, revision: str | None, *, computed_here: bool) -> Form | None:
        """None: left to the stage."""
        if stored is not None and Path(path).is_relative_to(stored) and not Path(path).exists():
            return None
        directory = local_path(path)
        if directory is None and is_hub_id(path):
            directory = target_dir(TargetSpec(model=path, revision=revision))  # None: not in the cache
        elif directory is None or not (directory / _CONFIG).is_file():
            raise InvalidInput(f"{drafter} is not a directory with config.json on the server",
                               "give the directory of a drafter, or a Hub id org/name")
        if directory is None or facts.target is None or facts.sizes is None:
            return None
        try:
            form = _checked_form(drafter, directory, Target(facts.target, facts.config), computed_here,
                                 whole=local_path(path) is not None)
            generation = facts.target / "generation_config.json"
            ends = end_token_ids(language_model(facts.config), read_object(generation) if generation.is_file() else {})
            wanted = TargetSizes(facts.sizes.hidden_size, facts.sizes.vocab_size, facts.sizes.num_layers, ends)
            for fault in fit_rules(drafter, form.family, form.config, wanted):
                raise InvalidInput(fault.what, fault.hint)
        except UnsupportedTarget as unread:  # of a file that cannot be read
            raise InvalidInput(f"{drafter}: {unread.message}", unread.hint) from None
        return form

    for field, named in (("drafters", job.spec.drafters), ("rivals", job.rivals)):
        for drafter in named:
            if drafter.path is not None:
                checked(f"{field}: {drafter.path!r}", drafter.path, drafter.revision,
                        computed_here=job.spec.engine.kind == "embedded")
    heads: dict[PublishedDrafter, Form | None] = {}
    for spec in (candidate.drafter for candidate in job.candidates):
        if spec.head is None:
            continue
        if not FAMILIES[spec.family].continues:
            raise InvalidInput(f"drafter.init_from is set, and training of {spec.family} drafters cannot continue from "
                               "a checkpoint", "leave it out, or train one of "
                               + ", ".join(name for name, row in FAMILIES.items() if row.continues))
        if spec.head not in heads:  # training computes it, whatever the engine is
            heads[spec.head] = checked(f"drafter.init_from {spec.head.path!r}", spec.head.path, spec.head.revision,
                                       computed_here=True)
        form = heads[spec.head]
        if form is not None and form.family is not None:
            require_agreement(spec, form.family, form.config)


def _checked_form(drafter: str, directory: Path, target: Target, computed_here: bool, *, whole: bool) -> Form:
    """What the drafter in a directory becomes. Raises InvalidInput for one that would not be adopted.

    drafter        field and path, for the messages
    computed_here  Eyrie's own engine computes it
    whole          its weights are in the directory; of a Hub id the stage may fetch them
    """
    config, tensors = read_object(directory / _CONFIG), _tensors(directory, whole)
    try:
        form = convert(config, tensors, target.architecture, target.num_layers)
    except InvalidInput as fault:
        raise InvalidInput(f"{drafter}: {fault.message}", fault.hint) from None
    faults = form_faults(form, tensors, target)
    if not faults and computed_here and form.family == "eagle3":
        faults = [*own_engine_rules(form.config)]
    if faults:
        raise InvalidInput(f"{drafter}: {'; '.join(fault.what for fault in faults)}", faults[0].hint)
    return form


def _tensors(directory: Path, whole: bool) -> dict[str, Header] | None:
    """Names, dtypes and shapes of the stored tensors; of pickled ones the names alone, as far as they can be read
    without unpickling. None where they are unknown. Raises UnsupportedTarget, and InvalidInput where there are none."""
    files, pickled = sorted(directory.glob("*.safetensors")), directory / _PICKLED
    if files and (whole or weights_are_here(directory)):
        return {name: Header(_DTYPE_NAMES.get(tensor.dtype, tensor.dtype), tensor.shape)
                for file in files for name, tensor in read_header(file).items()}
    if pickled.is_file():
        return _pickled_names(pickled)
    if whole:
        raise UnsupportedTarget(f"no weights in {directory}", f"give a directory with {SINGLE} or {_PICKLED}")
    return None


def _pickled_names(path: Path) -> dict[str, Header] | None:
    """Tensor names in a file of `torch.save`: the strings that end like parameters in its pickle, which is not run."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickle = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if pickle is None or archive.getinfo(pickle).file_size > _MAX_PICKLE_BYTES:
                return None
            strings = {value for _, value, _ in pickletools.genops(archive.read(pickle)) if isinstance(value, str)}
    except (OSError, ValueError, zipfile.BadZipFile):  # of torch before 1.6, or damaged: the stage says which
        return None
    return {name: Header(None, None) for name in strings if name.endswith(_PARAMETERS)}
