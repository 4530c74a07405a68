"""The prove stage: the tuned drafter in the engine that will serve it, before anybody is served by it.

    python -m eyrie_workers.stages.prove --spec spec.json --out manifest.json

Benchmark and tune measured in our reference engine. What is promoted is served by a server, perhaps another engine, to
several users at once. So servers are started here, alike but for their drafting (`off`, `candidate` and, when a drafter
serves already, `incumbent`), and asked three things:

1. Parity: does the candidate's output equal `off`'s, and does it accept what our reference engine accepts?
2. Load: is it faster at every load the job declares, and how long does the first token take?
3. The changed system prompt: does that survive a change which every operator makes one day?

All three are asked even when the first is answered with no: promotion decides (`eyrie_api.decisions.promotion`), and
whoever reads its reasons wants the whole story. Where tuning found that speculation pays at none of the declared loads,
there is nothing to prove; the report says so and no server is started.

Every answered question is a line of the ledger, a load test one per level, so a killed stage goes on with the next.
The servers are on a leash (`engines.managed_servers`) and die with the stage.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.v1alpha1.load import LoadComparison, LoadReport, LoadSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.prove import ParityReport, ProveReport
from eyrie_api.v1alpha1.reports import TuneReport
from eyrie_api.v1alpha1.stages import ProveStage
from eyrie_api.v1alpha1.tuning import OFF, DrafterUse, Setting
from eyrie_workers.conversations.suites import Prompt, select
from eyrie_workers.engines.managed_servers import DrafterUses, ManagedServer, ServerPlan, command_line, managed_servers
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.load.endpoints import LoadEndpoint, LoadPrompt
from eyrie_workers.load.report_statistics import crossover
from eyrie_workers.load.run import run_load
from eyrie_workers.machine.environment import environment
from eyrie_workers.measurement.benchmark.samples import first_difference
from eyrie_workers.measurement.benchmark.session import (
    REPORT,
    Suites,
    interleave,
    measuring,
    open_ledger_of,
    read_suites,
)
from eyrie_workers.measurement.parity.evidence import Evidence
from eyrie_workers.measurement.parity.parity import judge, prove_parity
from eyrie_workers.measurement.parity.served_answers import ask_all
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.loading import resolve
from eyrie_workers.targets.templates import ChatTokenizer

FOUND = "found.jsonl"
BASELINE, CANDIDATE, INCUMBENT = "off", "candidate", "incumbent"
FIXED = "fixed"
"""The candidate held to the setting that is proven, where its map says another for a single user."""

PARITY, CHANGED_PROMPT = "parity", "changed system prompt"

_REPEATS = 2  # blocks per level, the order of the variants turned round in between: a slow minute meets both
_WARMUP_REQUESTS = 2


class Found(Frozen):
    """One answered question: a line of the ledger."""

    question: str
    parity: ParityReport | None = None
    load: LoadReport | None = None


@dataclass(frozen=True)
class _Question:
    """Something to be asked of the servers."""

    name: str
    num_requests: int
    """About; for the progress."""

    ask: Callable[["_Proof"], Found]


@dataclass
class _Proof:
    """The stage under way."""

    spec: ProveStage
    stage: Stage
    plan: ServerPlan
    uses: DrafterUses
    prompts: Sequence[Prompt]
    ledger: JsonlLedger[Found]
    variants: dict[str, ManagedServer] = field(default_factory=dict)
    done: int = 0
    """Requests of the questions answered."""

    total: int = 0
    asking: int = 0
    """Requests of the present question."""

    def found(self, name: str) -> Found | None:
        """What the ledger has on a question."""
        return next((one for one in self.ledger.entries if one.question == name), None)

    def tell(self, done: int, total: int, words: str) -> None:
        """How far the present question is, by its own count."""
        share = min(1.0, done / max(1, total))
        self.stage.progress(self.done + round(self.asking * share), self.total, "requests", words)

    def measure(self, spec: LoadSpec, variants: Iterable[str]) -> LoadReport:
        """A load test of some variants."""
        asked = [LoadEndpoint(name, self.variants[name].url, self.plan.model,
                             what=words_of(self.uses[name])) for name in variants]
        return run_load(asked, [LoadPrompt.of(prompt) for prompt in self.prompts], spec, BASELINE, self.tell,
                        self.stage.pause_point)


def prove(spec: ProveStage, stage: Stage) -> Result:
    """Try the tuned drafter in the serving engine."""
    started = time.monotonic()
    plan = ServerPlan(spec.engine, spec.target, spec.max_concurrency, spec.benchmark.threads)
    tuned = read_manifest(Path(spec.tune_dir)).report_as(TuneReport)
    assert isinstance(tuned, TuneReport)
    use = use_to_prove(spec, tuned, plan)
    if use.setting == OFF:
        return _nothing_to_prove(spec, stage, use, started)
    suites = read_suites(spec, stage)
    uses = variants_to_compare(spec, use, stage)
    launch = command_line(plan, CANDIDATE, uses, _variants_dir(stage))
    proof = _Proof(spec, stage, plan, uses, prompts_to_ask(spec, suites), open_ledger_of(Found, stage, spec, FOUND))
    _ask_all(proof, questions_of(spec, len(uses.keys() - {FIXED})))
    report = _report(proof, use, launch, time.monotonic() - started)
    for step, one in enumerate(_comparisons(report.load)):
        stage.metric(f"{one.variant}/{one.level:g} users/speedup", step, one.throughput_ratio)
    stage.event("Proved", verdict_of(report), warning=report.parity is None or not report.parity.passed)
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [stage.out_dir / FOUND, stage.out_dir / REPORT])


def _nothing_to_prove(spec: ProveStage, stage: Stage, use: DrafterUse, started: float) -> Result:
    loads = ", ".join(map(str, spec.prove.loads))
    finding = use.map.finding if use.map is not None else ""
    report = ProveReport(
        checkpoint=spec.checkpoint, path=spec.drafter_dir, engine=spec.engine, use=use,
        skipped=f"speculation pays at none of the declared loads ({loads} users at once): {finding}".rstrip(" :"),
        environment=environment(spec.target.dtype), seconds=time.monotonic() - started)
    stage.event("NothingToProve", report.skipped)
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [stage.out_dir / REPORT])


def use_to_prove(spec: ProveStage, tuned: TuneReport, plan: ServerPlan) -> DrafterUse:
    """What the endpoint would be told: the best setting at the lowest declared load that drafts at all, or off.

    The operating map goes with it where the engine can follow it: then it is what is measured at the other loads.
    """
    chart = tuned.map
    if chart is None:
        return DrafterUse(drafter_dir=spec.drafter_dir, setting=Setting(tree=tuned.winner))
    best = [chart.at(load).setting for load in sorted(spec.prove.loads)]
    setting = next((one for one in best if one != OFF), OFF)
    followed = DrafterUse(drafter_dir=spec.drafter_dir, setting=setting, map=chart)
    if setting == OFF or plan.is_adaptive(followed):
        return followed
    # One setting at every load: the chosen drafter is the map's own, so a directory is named only where it is read.
    return DrafterUse(drafter_dir=spec.drafter_dir if setting.method == "drafter" else None, setting=setting)


def variants_to_compare(spec: ProveStage, use: DrafterUse, stage: Stage) -> DrafterUses:
    """What the servers decode with. An incumbent whose drafter is gone cannot be compared with, which is told."""
    uses = {BASELINE: DrafterUse(), CANDIDATE: use}
    if use.map is not None and use.map.at(1).setting != use.setting:
        # Parity is asked one prompt at a time, at which the candidate would follow its map to something else.
        uses[FIXED] = use.model_copy(update={"map": None})
    incumbent = spec.incumbent
    if incumbent is not None and incumbent.drafter_dir is not None and not Path(incumbent.drafter_dir).is_dir():
        stage.event("IncumbentGone", f"the drafter that serves now, {incumbent.drafter_dir}, is not there any more: "
                    "the candidate is compared with no drafter alone", warning=True)
    elif incumbent is not None:
        uses[INCUMBENT] = incumbent
    return uses


def prompts_to_ask(spec: ProveStage, suites: Suites) -> list[Prompt]:
    """Prompts of all suites in turn, beginning behind those that chose the checkpoint where a suite is that long."""
    share = -(-max(spec.prove.requests, spec.prove.parity_prompts) // len(suites))
    drawn = {suite.name: select(suites[suite.name], suite.max_prompts, share) for suite in spec.benchmark.suites}
    return [prompt for _, prompt in interleave(drawn)]


def questions_of(spec: ProveStage, num_variants: int) -> list[_Question]:
    """Everything that is asked, in order."""
    prove = spec.prove
    per_variant = prove.requests + _WARMUP_REQUESTS
    questions = [_Question(PARITY, 3 * prove.parity_prompts, _ask_parity)]
    for load in prove.loads:
        questions.append(_Question(_load_question(load), num_variants * max(per_variant, 2 * load * _REPEATS),
                                   partial(_ask_load, load=load)))
    if prove.system_prompt:
        questions.append(_Question(CHANGED_PROMPT, 2 * (prove.requests // 2 + _WARMUP_REQUESTS), _ask_changed_prompt))
    return questions


def _load_question(load: int) -> str:
    return f"load {load}"


def _ask_all(proof: _Proof, questions: Sequence[_Question]) -> None:
    """Ask what the ledger has no answer to. Servers are started only when something is left to ask."""
    proof.total = sum(one.num_requests for one in questions)
    left = [one for one in questions if proof.found(one.name) is None]
    proof.done = proof.total - sum(one.num_requests for one in left)
    if not left:
        return
    stage = proof.stage
    with measuring(stage), managed_servers(proof.plan, proof.uses, _variants_dir(stage),
                                            stage.pause_point) as proof.variants:
        stage.event("ServersReady", f"{len(proof.uses)} servers of the {proof.spec.engine} engine answer: "
                    + ", ".join(f"{name} ({words_of(use)})" if name != BASELINE else name
                                for name, use in proof.uses.items()))
        for question in left:
            stage.pause_point()
            proof.asking = question.num_requests
            found = question.ask(proof)
            proof.ledger.append(found)
            proof.done += question.num_requests


def _ask_parity(proof: _Proof) -> Found:
    spec = proof.spec
    target_dir = resolve(spec.target)
    tokenizer = ChatTokenizer(target_dir)
    prompts = [tokenizer.render(list(prompt.messages), list(prompt.tools) or None)
               for prompt in proof.prompts[: spec.prove.parity_prompts]]
    plain, drafted = proof.variants[BASELINE], proof.variants.get(FIXED, proof.variants[CANDIDATE])
    told = itertools.count(1)

    def pause() -> None:
        proof.stage.pause_point()
        proof.tell(next(told), proof.asking, "parity")

    if drafted.use.setting.method == "ngram":
        report = _same_answers(proof, plain, drafted, prompts, pause)
    else:
        tree = drafted.use.setting.tree
        assert tree is not None
        report = prove_parity(
            spec.engine, plain.server.url, drafted.server.url, proof.plan.model, target_dir, Path(spec.drafter_dir),
            tree, prompts, spec.prove.max_new_tokens, spec.target.dtype, pause=pause)
    proof.stage.event("Parity", ("holds: " if report.passed else "FAILS: ") + "; ".join(report.reasons),
                      warning=not report.passed)
    return Found(question=PARITY, parity=report)


def _same_answers(proof: _Proof, plain: ManagedServer, drafted: ManagedServer, prompts: Sequence[Sequence[int]],
                  pause: Callable[[], None]) -> ParityReport:
    """Parity of n-gram look-up: nothing was trained that could be served wrongly, so only the answers are compared."""
    spec, tree = proof.spec, drafted.use.setting.tree
    assert tree is not None
    without, with_it = (ask_all(spec.engine, variant.server.url, proof.plan.model, prompts, spec.prove.max_new_tokens,
                                pause=pause) for variant in (plain, drafted))
    evidence = []
    for index, (one, other) in enumerate(zip(without, with_it, strict=True)):
        place = first_difference(one.token_ids, other.token_ids)
        evidence.append(Evidence(f"prompt {index}", place is None, other.histogram, other.histogram,
                                 "" if place is None else f"prompt {index}: position {place}"))
    report = judge(spec.engine, tree, spec.target.dtype, evidence)
    said = "n-gram look-up has no weights to be served wrongly: its rounds are not compared with the reference's"
    return report.model_copy(update={"reasons": (*report.reasons, said)})


def _load_spec(spec: ProveStage, loads: Sequence[int], num_requests: int,
               system_prompt: str | None = None) -> LoadSpec:
    return LoadSpec(
        concurrencies=tuple(loads), requests=max(1, num_requests // _REPEATS), repeats=_REPEATS,
        warmup_requests=_WARMUP_REQUESTS, max_new_tokens=spec.prove.max_new_tokens, system_prompt=system_prompt,
        seed=spec.benchmark.seed)


def _ask_load(proof: _Proof, load: int) -> Found:
    variants = [name for name in proof.uses if name != FIXED]
    report = proof.measure(_load_spec(proof.spec, [load], proof.spec.prove.requests), variants)
    for one in report.comparisons:
        proof.stage.event("LoadMeasured", f"{users(load)}: {compared(one)}")
    for note in report.notes:
        proof.stage.event("LoadNote", note, warning=True)
    return Found(question=_load_question(load), load=report)


def _ask_changed_prompt(proof: _Proof) -> Found:
    prove = proof.spec.prove
    # The question is whether acceptance collapses, not by how much speed differs: half of the requests tell.
    spec = _load_spec(proof.spec, [min(prove.loads)], prove.requests // 2, prove.system_prompt)
    report = proof.measure(spec, (BASELINE, CANDIDATE))
    for one in report.comparisons:
        between = f"{one.user_interval.low:.2f}-{one.user_interval.high:.2f}"
        proof.stage.event("ChangedPrompt", f"with another system prompt: {one.user_ratio:.2f}x ({between}) for a user, "
                                           f"{one.identical} of {one.compared} answers identical")
    return Found(question=CHANGED_PROMPT, load=report)


def _report(proof: _Proof, use: DrafterUse, launch: tuple[str, ...], seconds: float) -> ProveReport:
    spec = proof.spec
    parity, changed = proof.found(PARITY), proof.found(CHANGED_PROMPT)
    parts = [one.load for load in spec.prove.loads if (one := proof.found(_load_question(load))) and one.load]
    load = joined(parts, _load_spec(spec, spec.prove.loads, spec.prove.requests))
    return ProveReport(
        checkpoint=spec.checkpoint, path=spec.drafter_dir, engine=spec.engine, use=use,
        parity=parity.parity if parity else None, load=load,
        changed_prompt=changed.load if changed else None, launch=launch, environment=environment(spec.target.dtype),
        seconds=seconds)


def joined(parts: Sequence[LoadReport], spec: LoadSpec) -> LoadReport:
    """The load tests of single levels as the one they would have been. Pure."""
    comparisons = tuple(one for part in parts for one in part.comparisons)
    return LoadReport(
        model=parts[-1].model, spec=spec, variants=parts[-1].variants,
        levels=tuple(one for part in parts for one in part.levels), comparisons=comparisons,
        crossover=crossover([one for one in comparisons if one.variant == CANDIDATE]),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)), environment=parts[-1].environment,
        seconds=sum(part.seconds for part in parts))


def words_of(use: DrafterUse) -> str:
    """A setting, and whether it follows the load."""
    return use.setting.label() + (" by load" if use.map is not None else "")


def users(load: int) -> str:
    """`1 user`, `4 users at once`."""
    return "1 user" if load == 1 else f"{load} users at once"


def compared(one: LoadComparison) -> str:
    """`candidate 1.84x (1.62-2.09) the tokens per second of off, time to first token (p99) 1.10x`."""
    first = "" if one.ttft_p99_ratio is None else f", time to first token (p99) {one.ttft_p99_ratio:.2f}x"
    return (f"{one.variant} {one.throughput_ratio:.2f}x ({one.throughput_interval.low:.2f}-"
            f"{one.throughput_interval.high:.2f}) the tokens per second of {one.baseline}{first}")


def verdict_of(report: ProveReport) -> str:
    """The proof in one sentence."""
    parity = "parity not asked" if report.parity is None else f"parity {'holds' if report.parity.passed else 'FAILS'}"
    loads = [f"{one.throughput_ratio:.2f}x with {users(int(one.level))}"
             for one in _comparisons(report.load) if one.variant == CANDIDATE]
    changed = [f"{one.user_ratio:.2f}x with another system prompt" for one in _comparisons(report.changed_prompt)]
    return f"{report.checkpoint} at {words_of(report.use)} in the {report.engine} engine: " + ", ".join(
        [parity, *loads, *changed])


def _comparisons(load: LoadReport | None) -> tuple[LoadComparison, ...]:
    return load.comparisons if load is not None else ()


def _variants_dir(stage: Stage) -> Path:
    return stage.out_dir / "variants"


if __name__ == "__main__":
    sys.exit(run_program(ProveStage, prove))
