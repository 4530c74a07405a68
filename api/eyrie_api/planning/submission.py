"""A job that is being submitted: resolved, with what is known of its target, data and machine."""

import os
from dataclasses import dataclass
from functools import cached_property

from eyrie_api.contract.capture import StateSourceName
from eyrie_api.contract.cluster import NODE_GPUS
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.targets import ELEMENT_BYTES, is_hub_id
from eyrie_api.planning.facts import Facts, gpus_of, local_path
from eyrie_api.planning.target_config import choose_source
from eyrie_api.planning.target_files import check_tokenizer, served_bytes, weights_are_here
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.planning.training_defaults import gpu_bytes
from eyrie_api.settings import Settings


@dataclass(frozen=True)
class Submission:
    job: ResolvedJob
    facts: Facts
    settings: Settings

    @property
    def node_gpus(self) -> int:
        """The most GPUs that one node has, or one machine that a job is planned for."""
        profile = self.facts.profile
        return max(NODE_GPUS, len(gpus_of(os.environ))) if profile is None else profile.node_gpus

    @property
    def architectures(self) -> list[str]:
        """Of the target's config.json; empty where it is not here."""
        named = self.facts.config.get("architectures")
        return [str(name) for name in named] if isinstance(named, list) else []

    @property
    def target_is_here(self) -> bool:
        """Whether the target's files are all on this machine; a Hub snapshot may hold its config.json alone."""
        return self.facts.target is not None and (
            not is_on_hub(self.job.spec.target.model) or weights_are_here(self.facts.target))

    @cached_property
    def target_warnings(self) -> tuple[str, ...]:
        """Of the target's tokenizer and chat template, which are read once. Raises as `check_tokenizer`."""
        facts = self.facts
        if facts.target is None or facts.sizes is None or not self.target_is_here:
            return ()
        return check_tokenizer(facts.target, facts.config, facts.sizes.vocab_size)

    @cached_property
    def source(self) -> StateSourceName:
        """What computes the hidden states of a target whose config.json is here. Raises as `choose_source`."""
        job, facts = self.job, self.facts
        assert facts.sizes is not None
        # Whether a GPU of the capture stage can hold the target's weights; assumed where its label names no size.
        device = gpu_bytes(job.gpus["capture"].gpu_type)
        fits = device is None or facts.sizes.parameters * ELEMENT_BYTES[job.target.dtype] <= usable_bytes(device)
        return choose_source(facts.config, job.spec.capture.source, engine=job.spec.engine.kind,
                             streams=job.spec.capture.mode == "stream", fits_device=fits)

    def weight_bytes(self, engine: EngineKind) -> int | None:
        """Of the target in an engine, the embedded one standing for transformers too; None where it is not known."""
        facts = self.facts
        if facts.target is None or facts.sizes is None:
            return None
        return served_bytes(facts.target, facts.config, facts.sizes, self.job.target.dtype, engine)

    @property
    def is_computed_here(self) -> bool:
        """Whether a stage computes the target with Eyrie's own engine, or through transformers, from its weights."""
        spec = self.job.spec
        return "embedded" in (spec.engine.kind, spec.regenerate.engine) or (spec.trains and self.source != "sglang")

    def layer_choices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every set of layers that is fused, and the field that names it."""
        named = self.job.spec.capture.aux_layers
        return ([] if named is None else [("capture.aux_layers", named)]) + [
            (f"drafter.aux_layers (candidate {candidate.name})", candidate.drafter.aux_layers)
            for candidate in self.job.candidates if candidate.drafter.aux_layers is not None and candidate.fuses]


def is_on_hub(name: str) -> bool:
    return local_path(name) is None and is_hub_id(name)

