"""The shared workspace of experiments: answers, states, drafters and counts, each computed once.

What is experimented on (target, prompts, suites, draft vocabulary, learning rate, unrolled depth) is that of a job:
`make demo`'s, or `make demo-published`'s.

Artifacts are written by the stages themselves, in a directory named after the digest of the spec. Two experiments with
the same spec share an artifact, and an interrupted one resumes. A directory identifies its spec and not the code that
wrote it: after a change to the code, delete the work directory.

    work/regenerate-<digest>/     answers of the target          work/first-<n>-<digest>/   the first n of them
    work/capture-<digest>/        states                         work/train-<digest>/       drafters
    work/decoded-<digest>.json    what a drafter accepted, prompt by prompt

Smaller amounts of data are prefixes of larger ones: `rows` truncates one set of answers.

tau is counted by decoding, never simulated, over the held-out prompts of the suites, 16 at a time. An answer and
its rounds depend on the request alone, so neither concurrency nor other work on the machine changes tau.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.experiments.fits import Counted, counted_of
from eyrie_api.artifacts import digest_bytes, digest_directory, digest_model, read_report, write_model
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import CheckpointReport, TrainReport
from eyrie_api.contract.stages import CaptureStage, RegenerateStage, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_operator.cli.demo import demo_job
from eyrie_workers.data.rows import META, ROWS
from eyrie_workers.data.suites import Prompt, load_suite, select
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import Result, SpecT, Stage, run_program
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.stages.train import train
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

COMPARED: tuple[str, ...] = ("eagle3", "eagle1")
CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
JOB = "experiments"
Settings = Mapping[str, float | str | None]
"""Fields of a TrainSpec."""

_CONCURRENCY = 16
_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Scale:
    """The sizes of an experiment."""

    conversations: int
    steps: int
    """Optimizer steps of one drafter, 1024 tokens each."""

    seeds: int
    prompts: int
    """Of each suite."""

    tokens: int
    """Of an answer, at most."""

    seconds: float
    """Of training, where families are compared at equal time."""


FULL = Scale(conversations=800, steps=240, seeds=3, prompts=12, tokens=64, seconds=100.0)
SHORT = Scale(conversations=160, steps=60, seeds=2, prompts=3, tokens=48, seconds=10.0)
PUBLISHED = Scale(conversations=800, steps=320, seeds=1, prompts=12, tokens=64, seconds=480.0)
"""Of a target ten times as large."""


class _Decoded(Frozen):
    counted: tuple[Counted, ...]


@dataclass(frozen=True)
class Trained:
    """One trained drafter and its checkpoints."""

    directory: Path
    report: TrainReport

    def path(self, checkpoint: CheckpointReport) -> Path:
        """Directory of one checkpoint."""
        return self.directory / checkpoint.path

    @property
    def last(self) -> Path:
        """Directory of the finished drafter."""
        return self.path(self.report.checkpoints[-1])


class Workspace:
    """A job and a work directory. The job is `make demo`'s where none is given."""

    def __init__(self, work: Path, scale: Scale, job: JobSpec | None = None) -> None:
        self.work, self.scale = work.resolve(), scale
        self.job = job or demo_job(short=False)
        self.spec = TargetSpec(model=self.job.target.model)
        self.path = resolve(self.spec)
        self.tokenizer = ChatTokenizer(self.path)
        self._target: TargetModel | None = None

    @property
    def target(self) -> TargetModel:
        """The target, loaded when it is first needed."""
        if self._target is None:
            self._target = load_target(self.path)
        return self._target

    def rows(self, num: int | None = None) -> Path:
        """The first `num` conversations, answered by the target; default: all of the scale."""
        spec = RegenerateStage(
            job_id=JOB, target=self.spec,
            data=self.job.data.model_copy(update={"max_conversations": self.scale.conversations}),
            regenerate=self.job.regenerate,
            exclude_prompts=tuple(suite.path for suite in self.job.benchmark.suites))
        whole = self._made("regenerate", spec, regenerate)
        if num is None or num >= self.scale.conversations:
            return whole
        lines = (whole / ROWS).read_bytes().splitlines(keepends=True)[:num]
        return self.given_rows(f"first-{num}", lines, whole)

    def given_rows(self, name: str, lines: Sequence[bytes], like: Path) -> Path:
        """Rows made from those of `like`, as a directory that can be captured."""
        content = b"".join(lines)
        out = self.work / f"{name}-{digest_bytes(content)[7:19]}"
        if not out.exists():
            aside = out.with_name(out.name + ".part")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / ROWS).write_bytes(content)
            shutil.copy(like / META, aside / META)
            aside.rename(out)
        return out

    def store(self, rows: Path, aux_layers: tuple[int, ...] | None = None) -> Path:
        """Captured states of some rows, for every compared family."""
        return self._made("capture", CaptureStage(
            job_id=JOB, target=self.spec, rows_dir=str(rows), capture=CaptureSpec(aux_layers=aux_layers, check_rows=0),
            families=COMPARED), capture)

    def train(self, store: Path, *, seed: int = 0, family: str = "eagle3", checkpoints: int = 4,
              drafter: DrafterSpec | None = None, settings: Settings = MappingProxyType({})) -> Trained:
        """A drafter trained from a store, for the scale's steps unless `settings` say otherwise."""
        chosen, job = drafter or DrafterSpec(), self.job
        shape = chosen.model_copy(update={
            "family": family, "draft_vocab_size": chosen.draft_vocab_size or job.drafter.draft_vocab_size})
        spec = {"learning_rate": self.learning_rate(family), "epochs": 1000.0,
                "ttt_length": job.train.ttt_length, "max_steps": self.scale.steps,
                "max_tokens_per_batch": _BATCH_TOKENS, "save_every_steps": 100, **settings}
        out = self._made("train", TrainStage(
            job_id=JOB, candidate="c0", target=self.spec, drafter=shape, store_dir=str(store),
            train=TrainSpec.model_validate(spec | {"seed": seed, "num_checkpoints": checkpoints})), train)
        report = read_report(out / "manifest.json", TrainReport)
        assert isinstance(report, TrainReport)
        return Trained(out, report)

    def learning_rate(self, family: str) -> float:
        """The job's, which is for EAGLE-3, or the family's default for this target. Specs name it, so that what was
        trained at another default is another artifact."""
        own = family_named(family).default_rate(read_config(self.path).hidden_size)
        return self.job.train.learning_rate or own if family == "eagle3" else own

    def prompts(self, num: int | None = None) -> list[Prompt]:
        """Held-out prompts of all suites: the suites in turn, so that any beginning is a fair mixture."""
        by_suite = [select(load_suite(suite), 0, num or self.scale.prompts) for suite in self.job.benchmark.suites]
        return [prompt for turn in zip(*by_suite, strict=True) for prompt in turn]

    def request(self, prompt: Prompt, temperature: float, tokens: int | None = None) -> Request:
        """The request of a prompt; the same noise in every variant."""
        return Request(
            id=f"{prompt.suite}/{prompt.id}", max_new_tokens=tokens or self.scale.tokens, seed=0,
            prompt_ids=self.tokenizer.render(list(prompt.messages), list(prompt.tools) or None),
            sampling=SamplingSpec(temperature=temperature), stop_ids=tuple(self.tokenizer.eos_ids))

    def decode(self, drafter: Path, shape: DraftTreeShape = CHAIN, temperature: float = 0.0) -> tuple[Counted, ...]:
        """Rounds and accepted tokens of a drafter over all prompts."""
        requests = [self.request(prompt, temperature) for prompt in self.prompts()]
        key = digest_bytes(repr((digest_directory(drafter), shape, requests, self.spec)).encode())
        file = self.work / f"decoded-{key[7:23]}.json"
        if file.exists():
            return _Decoded.model_validate_json(file.read_bytes()).counted
        engine = Engine(self.target, open_drafter(drafter, self.target), max_concurrency=_CONCURRENCY)
        counted = tuple(counted_of(answer) for answer in engine.generate(requests, shape))
        write_model(file, _Decoded(counted=counted))
        return counted

    def _made(self, stage: str, spec: SpecT, work: Callable[[SpecT, Stage], Result]) -> Path:
        out = self.work / f"{stage}-{digest_model(spec)[7:19]}"
        out.mkdir(parents=True, exist_ok=True)
        (out / "spec.json").write_text(spec.model_dump_json())
        code = run_program(type(spec), work, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])
        if code:
            raise SystemExit(code)
        return out

