"""The cost of each codec: bytes, error, and acceptance length in the reference engine, with the spread over seeds.

    python -m benchmarks.codecs --out .eyrie/bench/codecs.json

The target answers conversations and its states are captured once, in float32. Each way of storing is transcoded from
that store, so nothing but the codec differs; from each, one drafter per seed is trained with the demo's settings,
shrunk; each drafter then decodes the same held-out prompts greedily, and tau is counted (tokens per target pass).
Drafters are compared seed by seed: a seed draws the same initial weights and the same batches whatever the codec.

`seed_spread`, the standard deviation of float32's tau over seeds, is the reference: a codec is *within seed noise* when
its mean loss against float32 is smaller.

Resumable: rows, stores, checkpoints and counts are kept next to the report.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks.codecs.report import CodecReport, SeedResult, WayResult
from benchmarks.transcode import transcode
from eyrie_api.artifacts import read_report
from eyrie_api.contract.benchmark import QUICKSTART_SUITES
from eyrie_api.contract.capture import CaptureSpec, StoredAs, final_codec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import CaptureStage, RegenerateStage, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.data.suites import load_suite, select
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.hidden_states.codecs import decode_into, encode, relative_error
from eyrie_workers.hidden_states.shard_format import StoreFormat, supervised_positions
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.topk_logits import compute_topk_logits, rebuild_distribution
from eyrie_workers.machine import environment
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import Result, SpecT, Stage, run_program
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.stages.train import train
from eyrie_workers.targets import draft_vocabulary
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target, resolve, special_token_ids
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.targets.templates import ChatTokenizer

TREE = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
_SAMPLE_TOKENS = 8192  # of which errors are measured
_CONCURRENCY = 16  # tau does not depend on it; higher is faster


def way_named(name: str) -> StoredAs:
    """`int8`, or `int8+top16`."""
    codec, _, top = name.partition("+top")
    return StoredAs(codec, "topk", int(top)) if top else StoredAs(codec)  # type: ignore[arg-type]


class CodecTrial:
    """The directories and steps of one measurement of all codecs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home: Path = options.out.with_suffix("")
        self.spec = TargetSpec(model=options.target)
        self.path = resolve(self.spec)
        self.target: TargetModel = load_target(self.path)
        self.drafter = DrafterSpec(draft_vocab_size=options.draft_vocab_size)

    def capture(self) -> FeatureStore:
        """Answers, and their states in float32."""
        options = self.options
        rows, store = self.home / "regenerate", self.home / "float32"
        _run(regenerate, RegenerateStage(
            job_id="codecs", target=self.spec,
            data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=options.conversations),
            regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32),
            exclude_prompts=tuple(suite.path for suite in QUICKSTART_SUITES)), rows)
        _run(capture, CaptureStage(job_id="codecs", target=self.spec, rows_dir=str(rows),
                                   capture=CaptureSpec(codec="float32")), store)
        return FeatureStore(store)

    def layout(self, way: StoredAs, source: FeatureStore) -> StoreFormat:
        """The source's, stored another way."""
        fields = source.format.model_dump() | {"codec": way.codec, "final_state": way.final_state}
        if way.final_state == "topk":
            fields |= {"top_k": way.top_k, "draft_ids": self.draft_ids(source)}
        return StoreFormat.model_validate(fields)

    def draft_ids(self, source: FeatureStore) -> tuple[int, ...]:
        """The draft vocabulary of the top-k logits."""
        config = read_config(self.path)
        counts = torch.zeros(config.vocab_size, dtype=torch.int64)
        for row in range(source.num_rows):
            counts += draft_vocabulary.count_tokens(*source.tokens(row), config.vocab_size)
        size = draft_vocabulary.choose_size(config.vocab_size, self.options.draft_vocab_size)
        always = [*config.eos_token_ids, *special_token_ids(self.path)]
        return tuple(draft_vocabulary.build(counts, size, always).ids.tolist())

    def train(self, name: str, store: Path, seed: int) -> tuple[Path, TrainReport]:
        """One drafter; its directory and report."""
        out = self.home / f"train-{name}-{seed}"
        _run(train, TrainStage(
            job_id="codecs", candidate="c0", target=self.spec, drafter=self.drafter, store_dir=str(store),
            train=TrainSpec(learning_rate=2e-3, epochs=self.options.epochs, num_checkpoints=1, seed=seed,
                            max_tokens_per_batch=1024, threads=self.options.threads)), out)
        report = read_report(out, TrainReport)
        assert isinstance(report, TrainReport)
        return out / report.checkpoints[-1].path, report

    def requests(self) -> list[Request]:
        """The held-out prompts of all suites, greedy."""
        tokenizer = ChatTokenizer(self.path)
        return [Request(id=f"{suite.name}/{prompt.id}",
                        prompt_ids=tokenizer.render(list(prompt.messages), list(prompt.tools) or None),
                        max_new_tokens=self.options.tokens, sampling=SamplingSpec(temperature=0.0), seed=0,
                        stop_ids=tuple(tokenizer.eos_ids))
                for suite in QUICKSTART_SUITES
                for prompt in select(load_suite(suite), 0, self.options.prompts)]

    def tau(self, drafter: Path, requests: Sequence[Request]) -> float:
        """Tokens per target pass over all prompts."""
        engine = Engine(self.target, open_drafter(drafter, self.target), max_concurrency=_CONCURRENCY)
        answers = engine.generate(requests, TREE)
        rounds = sum(answer.rounds for answer in answers)
        accepted = sum(k * count for answer in answers for k, count in enumerate(answer.accepted_histogram))
        return 1.0 + accepted / rounds


def run(options: argparse.Namespace) -> CodecReport:
    """Measure all codecs."""
    began = time.monotonic()
    if options.threads:
        torch.set_num_threads(options.threads)
    trial = CodecTrial(options)
    source = trial.capture()
    names = ["float32", *(name for name in options.ways if name != "float32")]
    requests = trial.requests()
    stores = {"float32": trial.home / "float32"}
    for name in names[1:]:
        stores[name] = trial.home / name
        transcode(source, stores[name], trial.layout(way_named(name), source), trial.target.lm_head_weight)
    seeds: dict[str, list[SeedResult]] = {name: [] for name in names}
    for seed in range(options.seeds):  # the outer loop: a stopped run has compared all codecs for some seeds
        for name in names:
            drafter, report = trial.train(name, stores[name], seed)
            seeds[name].append(SeedResult(
                seed=seed, tau=trial.tau(drafter, requests), train_s=report.seconds,
                theoretical_speedup=report.checkpoints[-1].theoretical_speedup))
            print(f"seed {seed}, {name}: tau {seeds[name][-1].tau:.3f}", flush=True)
    sample = _sample(source)
    base = [one.tau for one in seeds["float32"]]
    spread = stdev(base) if len(base) > 1 else 0.0
    ways = tuple(_way(trial, name, source, FeatureStore(stores[name]), sample, seeds[name], base, spread)
                 for name in names)
    environment_fields = environment("float32").model_dump()
    return CodecReport(
        target=options.target, conversations=options.conversations, tokens=source.num_tokens,
        answer_tokens=sum(int(source.tokens(row)[1].sum()) for row in range(source.num_rows)), prompts=len(requests),
        seed_spread=spread, hadamard_int4_error=hadamard_error(sample[0]), ways=ways,
        seconds=time.monotonic() - began, environment={name: str(value) for name, value in environment_fields.items()})


def _run(work: Callable[[SpecT, Stage], Result], spec: SpecT, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "spec.json").write_text(spec.model_dump_json())
    code = run_program(type(spec), work, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])
    if code:
        raise SystemExit(code)


def _sample(source: FeatureStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Aux states [T, A, H] and taught final states [M, H] of the first rows."""
    rows, tokens = 0, 0
    while rows < source.num_rows and tokens < _SAMPLE_TOKENS:
        tokens, rows = tokens + source.lengths[rows], rows + 1
    packed = source.read(range(rows))
    taught = torch.cat([supervised_positions(mask) for mask in packed.loss_mask.split(packed.lengths)])
    return packed.aux, packed.last[taught]


def hadamard_error(aux_TAH: torch.Tensor) -> float:
    """Relative error of int4 on states rotated by a random Hadamard transform: outliers shared among all values.

    Sylvester's matrix over the next power of two; signs drawn once. Orthogonal, so errors keep their length.
    """
    hidden = aux_TAH.shape[-1]
    size = 1 << (hidden - 1).bit_length()
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (hidden,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    turned = torch.nn.functional.pad(aux_TAH * signs, (0, size - hidden)) @ (matrix / size**0.5)
    return float(relative_error(turned, "int4").square().mean().sqrt())


def _way(trial: CodecTrial, name: str, source: FeatureStore, store: FeatureStore,
         sample: tuple[torch.Tensor, torch.Tensor], seeds: Sequence[SeedResult], base: Sequence[float],
         spread: float) -> WayResult:
    layout, taus = store.format, [one.tau for one in seeds]
    errors = relative_error(sample[0], layout.codec)
    lost = [of - tau for of, tau in zip(base, taus, strict=True)]
    per_token = store.size_bytes / store.num_tokens
    plain = (len(layout.aux_layers) + 1) * layout.hidden_size * 2 + 16
    return WayResult(
        name=name, bytes_per_token=per_token, share_of_bfloat16=per_token / plain,
        aux_error={str(layer): float(errors[:, place].square().mean().sqrt())
                   for place, layer in enumerate(layout.aux_layers)},
        aux_error_worst=float(errors.max()), teacher_kl=_teacher_kl(trial, layout, source, sample[1]),
        seeds=tuple(seeds), tau=fmean(taus), tau_spread=stdev(taus) if len(taus) > 1 else 0.0, lost=fmean(lost),
        lost_spread=stdev(lost) if len(lost) > 1 else 0.0, within_seed_noise=fmean(lost) <= spread)


def _teacher_kl(trial: CodecTrial, fmt: StoreFormat, source: FeatureStore, last_MH: torch.Tensor) -> float:
    ids = torch.tensor(trial.draft_ids(source))
    head = trial.target.lm_head_weight
    wanted = (last_MH @ head[ids].T).log_softmax(-1)
    if fmt.final_state == "topk":
        stored = compute_topk_logits([last_MH], OutputHead(head), fmt)
        given = rebuild_distribution(stored, ids.numel()).clamp_min(1e-30).log()
    else:
        back = torch.empty_like(last_MH)
        codec = final_codec(fmt.codec)
        decode_into(codec, *encode(codec, last_MH), back)
        given = (back @ head[ids].T).log_softmax(-1)
    return float((wanted.exp() * (wanted - given)).sum(-1).mean())
