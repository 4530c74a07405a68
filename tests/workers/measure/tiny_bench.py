"""A tiny target, a random drafter for it, and suites: what a real benchmark program needs, made in seconds."""

import json
from pathlib import Path

import torch

from eyrie_api.contract.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.families import Family
from eyrie_api.contract.stages import BenchmarkStage, TuneStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import TuneSpec
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from tests.tiny import tiny_target
from tests.workers.drafters.heads import scrambled


def random_drafter(path: Path, target: Path, seed: int = 0, layers: tuple[int, ...] | None = None,
                   family: Family = "eagle3") -> Path:
    """An untrained drafter with the target's output matrix: it proposes, and is mostly refused."""
    config = read_config(target)
    implementation = family_named(family)
    vocabulary = DraftVocabulary(ids=torch.arange(config.vocab_size), vocab_size=config.vocab_size)
    ends = read_target_embeddings(target, config.tie_word_embeddings)
    spec = DrafterSpec(family=family, max_draft_tokens=3 if family == "medusa" else None)
    drafter = implementation.create(spec, config, ends, layers or (1, 2, config.num_layers), vocabulary, seed)
    if family == "medusa":  # its blocks begin as zeros, which a check of checkpoints refuses
        scrambled(drafter)
    implementation.save(path, drafter, "float32", None)
    return path


def suite_file(path: Path, name: str, num: int) -> SuiteSpec:
    """A JSONL suite of `num` different questions."""
    file = path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"id": f"{name}-{i}", "prompt": f"{name}: what is {i} plus {i}?"}) + "\n"
                            for i in range(num)))
    return SuiteSpec(name=name, path=str(file), max_prompts=2)


def stage_specs(path: Path, *, prompts_per_suite: int = 6, max_new_tokens: int = 12,
                family: str = "llama") -> tuple[BenchmarkStage, TuneStage]:
    """Specs of both stages over one tiny target and drafter under `path`."""
    target = tiny_target(path / "target", family)
    drafter = random_drafter(path / "drafter", target)
    benchmark = BenchmarkSpec(
        suites=(suite_file(path, "sums", prompts_per_suite), suite_file(path, "talk", prompts_per_suite)),
        max_new_tokens=max_new_tokens, warmup_prompts=1, threads=1)
    named = {"job_id": "j", "checkpoint": "c-step-1", "candidate": "c", "target": TargetSpec(model=str(target)),
             "benchmark": benchmark, "drafter_dir": str(drafter)}
    tune = TuneSpec(num_steps=(2, 3), top_k=(1, 2), num_draft_tokens=(5,), concurrencies=(1, 3),
                    max_prompts=4)
    return BenchmarkStage.model_validate(named), TuneStage.model_validate(named | {"tune": tune})


def one_shape(spec: TuneStage) -> TuneStage:
    """The spec with one drafted shape at one concurrency, for tests of what surrounds the choice."""
    fewest = {"num_steps": (2,), "top_k": (2,), "num_draft_tokens": (5,), "concurrencies": (1,)}
    return spec.model_copy(update={"tune": spec.tune.model_copy(update=fewest)})
