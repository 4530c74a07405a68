"""The prove stage: the tuned drafter in the serving engine, before it serves clients.

    python -m eyrie_workers.stages.prove --spec spec.json --out manifest.json

Benchmark and tune measure in the engine that the job names, embedded or SGLang, one process with the machine to itself.
A promoted drafter is served by a server, to several users at once. This stage starts servers that differ in drafting
alone (`off`, `candidate`, when a drafter serves already, `incumbent`, and a tuned `rival` that the candidate has to
beat), all at once where their memory allows, else one after the other, and makes three checks:

1. Load: speed and time to first token at every load that the job declares.
2. Changed system prompt: the same with another system prompt, which operators change in production.
3. Parity: the candidate's output equals `off`'s, and it accepts the tokens that the reference engine accepts. The
   servers answer; the reference engine replays their rounds when they are gone, so that it has the memory. Where it
   cannot hold the target all the same, or does not compute it, the answers alone are compared, and the report says so.
   At the highest declared load both answer again, in several shapes and next to requests whose clients leave: an
   answer that changes there, and does not change without a drafter, was changed by drafting. So they do at temperature
   1, where the engine's samples can be compared (`measure.parity_under_load`).

A load is measured in pairs of blocks, with the candidate and without, until the interval of their ratio decides against
the bounds of the promotion, or `prove.most_pairs` is reached (`eyrie_api.decisions.evidence`). Servers that do not fit
next to each other have no such pairs: they answer a fixed number of requests.

All three run even when one fails: promotion decides (`eyrie_api.decisions.promotion`), and its reasons cover all of
them. When tuning found that speculation pays at none of the declared loads, the stage reports that and starts no
server.

The undrafted answers to prompts of one user message are written to a file of their own: where SGLang serves, which
cannot leave its drafter out of single requests, the console compares served answers with them.

Every finished check is a line of the ledger, the answers one and the load test one per level, from which an interrupted
stage resumes. Servers that tuning has passed on are used; all exit with the stage (`sglang.servers`), and are flushed
and warm before each block of a load test. A block, and a check of answers, during which a server ends is repeated once
with a new one; the report counts these restarts.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from eyrie_api.artifacts import digest_model, read_report, write_model
from eyrie_api.chat_template import probes
from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.comparison import ANSWERS_FILE, MAX_ANSWER, MAX_PROMPT, RecordedAnswer, RecordedAnswers
from eyrie_api.contract.load import LoadReport, LoadSpec, fewest_requests
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.prove import ParityReport, ProveReport, SampledParityReport
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.stages import ProveStage
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.decisions.evidence import (
    Standing,
    changed_prompt_standing,
    no_slowdown_standing,
)
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.planning.sglang_support import holds_mtp_layers
from eyrie_api.planning.target_config import computed_by_reference
from eyrie_workers.data.suites import Prompt, select
from eyrie_workers.drafters.family import family_of
from eyrie_workers.engines.process import EngineFailed, ServerProcess
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.machine import environment
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.benchmark.session import Suites, measuring, open_ledger, read_suites, reported, round_robin
from eyrie_workers.measure.load.client import EndpointUnusable, LoadEndpoint
from eyrie_workers.measure.load.report_statistics import (
    LevelResults,
    PairedRatios,
    crossover,
    load_standing,
    paired_ratios,
)
from eyrie_workers.measure.load.run import run_load, run_load_in_turn
from eyrie_workers.measure.parity import (
    Served,
    compare_answers,
    compare_prompts,
    first_difference,
    report_without_answers,
    request_answers,
)
from eyrie_workers.measure.parity_reference import Reference, why_not_held
from eyrie_workers.measure.parity_under_load import (
    LoadRequest,
    compare_sampled,
    compare_under_load,
    num_under_load,
    request_under_load,
    requests_under_load,
    sampled_not_compared,
    sampled_requests,
)
from eyrie_workers.sglang.local_hardware import detect_hardware, gpu_groups, visible_gpus
from eyrie_workers.sglang.managed_engine import GREEDY_ONLY
from eyrie_workers.sglang.servers import DrafterUses, ServerHistory, ServerPlan, ServerPool, command_line
from eyrie_workers.stage_program import Result, Stage, run_program
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import quantised_matrices, resolve
from eyrie_workers.targets.state_source import open_judge
from eyrie_workers.targets.templates import ChatTokenizer

LEDGER = "found.jsonl"
MOST_RECORDED = 32  # answers kept for comparisons: a list that a person chooses from
BASELINE, CANDIDATE, INCUMBENT, RIVAL = "off", "candidate", "incumbent", "rival"
FIXED = "fixed"
"""The candidate with the proven setting at every load, for parity, where its map has another for a single user."""

ANSWERS, PARITY, CHANGED_PROMPT = "answers", "parity", "changed system prompt"
VARIANTS = "variants"  # folder of the servers' files
_COMPARED_PROMPTS = 8  # of the proof, in addition to the probe's conversations
_REPEATS = 2  # blocks per level where servers do not fit next to each other
_WARMUP_REQUESTS = 2

StandingOf = Callable[[PairedRatios, LevelResults, LevelResults], Standing]
"""Of the candidate's comparison with the baseline, from their results so far."""


class Answers(Frozen):
    """Greedy answers of one server with the drafter and of the one without, one user at a time."""

    plain: tuple[Served, ...]
    drafted: tuple[Served, ...]
    changed_plain: tuple[Served, ...] = ()
    """With the changed system prompt."""

    changed_drafted: tuple[Served, ...] = ()
    loaded_plain: tuple[Served, ...] = ()
    """At the highest declared load, to `requests_under_load`."""

    loaded_drafted: tuple[Served, ...] = ()
    sampled_plain: tuple[Served, ...] = ()
    """At that load, to `sampled_requests`."""

    sampled_drafted: tuple[Served, ...] = ()
    prompt_differences: tuple[str, ...] = ()
    error: str = ""
    """Why the drafted server did not answer; then there are no drafted answers."""


class CheckResult(Frozen):
    """The result of one check: a line of the ledger."""

    question: str
    """Name of the check."""

    answers: Answers | None = None
    parity: ParityReport | None = None
    changed_parity: ParityReport | None = None
    loaded_parity: ParityReport | None = None
    sampled_parity: SampledParityReport | None = None
    load: LoadReport | None = None


@dataclass(frozen=True)
class _Check:
    name: str
    num_requests: int  # approximate; for the progress
    run: Callable[["Proof"], CheckResult]


@dataclass
class Proof:
    """State of the running stage."""

    spec: ProveStage
    stage: Stage
    plan: ServerPlan
    uses: DrafterUses
    prompts: Sequence[Prompt]  # of all suites: identity is checked on them
    load_prompts: Sequence[Prompt]  # of the suites that decide: speed is measured on them
    ledger: JsonlLedger[CheckResult]
    history: ServerHistory
    pool: ServerPool | None = None
    done: int = 0  # requests of the finished checks
    total: int = 0
    current: int = 0  # requests of the running check
    disturbed: str = ""  # other work while measuring
    last_try: bool = False  # a server has ended in the running check, which is being repeated

    def result(self, name: str) -> CheckResult | None:
        """The result of a check, if the ledger has it."""
        return next((result for result in self.ledger.entries if result.question == name), None)

    @property
    def parity_variant(self) -> str:
        """The variant with the drafter whose answers decide parity."""
        return FIXED if FIXED in self.uses else CANDIDATE

    def server(self, name: str) -> ServerProcess:
        """The ready server of a variant. Where not all fit, it replaces another."""
        assert self.pool is not None
        return self.pool.server(name)

    def endpoint(self, name: str) -> LoadEndpoint | None:
        """None for a variant that cannot start, and is left out from here on."""
        try:
            return LoadEndpoint(name, f"{self.server(name).url}/v1", self.plan.model,
                                what=describe_use(self.uses[name]))
        except (EngineFailed, InvalidInput) as error:
            self.leave_out(name, error)
            return None

    def leave_out(self, name: str, error: EyrieError) -> None:
        """Raises `error` for a variant without which there is no proof."""
        if name not in (INCUMBENT, RIVAL):
            raise error
        self.stage.event("IncumbentFailed" if name == INCUMBENT else "RivalFailed",
                         f"the {name}'s server cannot start, so the candidate is not compared with it under load: "
                         f"{error.message}", warning=True)
        del self.uses[name]

    def report_progress(self, done: int, total: int, message: str) -> None:
        share = min(1.0, done / max(1, total))
        self.stage.progress(self.done + round(self.current * share), self.total, "requests", message)

    def measure(self, load: int, least: int, most_pairs: int, variants: Iterable[str], standing: StandingOf,
                system_prompt: str | None = None) -> LoadReport:
        """The variants at one load, until the comparison of candidate and baseline is not open any more.

        least   requests per variant, at least
        """
        assert self.pool is not None
        names, prompts = list(variants), self.load_prompts
        if self.pool.capacity < len(names):
            return run_load_in_turn(names, self.endpoint, prompts, load_spec(
                self.spec, [load], max(1, least // _REPEATS), _REPEATS, system_prompt), BASELINE, self.report_progress,
                self.stage.pause_point, self.pool)

        def is_clear(levels: Sequence[LevelResults]) -> bool:
            level = {results.variant: results for results in levels}
            if len(level[BASELINE].results) < least:
                return False
            ratios = paired_ratios(level[CANDIDATE], level[BASELINE])
            return ratios is not None and standing(ratios, level[CANDIDATE], level[BASELINE]) != "open"

        # A block has the fewest requests of a closed loop: pairs of short blocks are near in time.
        repeats = max(most_pairs, -(-least // fewest_requests(load)))
        return run_load([endpoint for name in names if (endpoint := self.endpoint(name)) is not None], prompts,
                        load_spec(self.spec, [load], 1, repeats, system_prompt), BASELINE,
                        lambda done, _, label: self.report_progress(done, self.current, label),
                        self.stage.pause_point, is_clear, self.pool)


def prove(spec: ProveStage, stage: Stage) -> Result:
    """Check the tuned drafter in the serving engine."""
    started = time.monotonic()
    concurrency = spec.prove.at_once(spec.max_concurrency)
    engine = spec.engine
    groups = gpu_groups(visible_gpus(), engine.tp_size, engine.num_gpus) if engine.kind == "sglang" else ()
    plan = ServerPlan(engine.kind, spec.target, concurrency, spec.benchmark.threads, engine=engine,
                      gpu_groups=groups)
    tuned = read_report(Path(spec.tune_dir), TuneReport)
    use = select_use(spec, tuned, plan)
    report = ProveReport(checkpoint=spec.checkpoint, path=spec.drafter_dir, engine=engine.kind, use=use,
                         environment=environment(spec.target.dtype), seconds=0.0)
    if use.setting == OFF:
        loads = ", ".join(map(str, spec.prove.concurrencies))
        finding = use.map.finding if use.map is not None else ""
        report = report.model_copy(update={
            "skipped": f"speculation pays at none of the declared loads ({loads} users at once): {finding}"
            .rstrip(" :"), "seconds": time.monotonic() - started})
        stage.event("NothingToProve", report.skipped)
        return reported(report, stage)
    suites = read_suites(spec, stage)
    uses = variants_to_compare(spec, use, stage, tuned_rival(spec, tuned, plan))
    launch = command_line(plan, CANDIDATE, uses, stage.out_dir / VARIANTS)
    proof = Proof(spec, stage, plan, uses, select_prompts(spec, suites, spec.benchmark.suites),
                  select_prompts(spec, suites, spec.benchmark.deciding_suites),
                  open_ledger(CheckResult, stage, spec, LEDGER), ServerHistory(stage.out_dir, digest_model(spec)))
    _run_all(proof, checks_of(spec, len(uses.keys() - {FIXED})))
    collected = proof.result(ANSWERS)
    assert collected is not None
    assert collected.answers is not None
    if collected.answers.prompt_differences:
        stage.event("PromptsDiffer", "SGLang renders conversations otherwise than the drafter was trained: "
                    + "; ".join(collected.answers.prompt_differences[:3]), warning=True)
    parity, changed = proof.result(PARITY), proof.result(CHANGED_PROMPT)
    if parity is None:
        parity = judge_answers(proof, collected.answers)
        for judged in (parity.parity, parity.changed_parity, parity.loaded_parity, parity.sampled_parity):
            if judged is not None:
                result = {True: "holds: ", False: "FAILS: ", None: ""}[judged.passed]
                stage.event("Parity", result + "; ".join(judged.reasons), warning=judged.passed is False)
        proof.ledger.append(parity)
    # The load tests of single levels as one report of all levels.
    checks = [proof.result(_load_check(load)) for load in spec.prove.concurrencies]
    parts = [check.load for check in checks if check and check.load]
    comparisons = tuple(comparison for part in parts for comparison in part.comparisons)
    load = LoadReport(
        model=parts[-1].model, spec=parts[-1].spec.model_copy(update={"concurrencies": spec.prove.concurrencies}),
        variants=parts[-1].variants, levels=tuple(level for part in parts for level in part.levels),
        comparisons=comparisons,
        crossover=crossover([comparison for comparison in comparisons if comparison.variant == CANDIDATE]),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        environment=parts[-1].environment, seconds=sum(part.seconds for part in parts))
    report = report.model_copy(update={
        "parity": parity.parity, "load": load, "changed_prompt": changed.load if changed else None,
        "changed_parity": parity.changed_parity, "loaded_parity": parity.loaded_parity,
        "sampled_parity": parity.sampled_parity,
        "prompt_differences": collected.answers.prompt_differences, "disturbed": proof.disturbed,
        "restarts": proof.history.restarts, "starts": proof.history.starts, "launch": launch,
        "seconds": time.monotonic() - started})
    for step, comparison in enumerate(comparisons):
        stage.metric(f"{comparison.variant}/{comparison.level:g} users/speedup", step, comparison.throughput_ratio)
    holds = report.parity is not None and all(
        judged is None or judged.passed is not False
        for judged in (report.parity, report.loaded_parity, report.sampled_parity))
    results = ["parity not checked" if report.parity is None else f"parity {'holds' if holds else 'FAILS'}",
               *(f"{comparison.throughput_ratio:.2f}x with {users(int(comparison.level))}"
                 for comparison in comparisons if comparison.variant == CANDIDATE),
               *(f"{comparison.user_ratio:.2f}x with another system prompt"
                 for comparison in (changed.load.comparisons if changed and changed.load else ()))]
    stage.event("Proved", f"{report.checkpoint} at {describe_use(use)} in the {report.engine} engine: "
                + ", ".join(results), warning=not holds)
    write_model(stage.out_dir / ANSWERS_FILE, record_answers(
        proof.prompts, collected.answers.plain, ChatTokenizer(resolve(spec.target)), spec.prove.max_new_tokens))
    return reported(report, stage, [stage.out_dir / LEDGER, stage.out_dir / ANSWERS_FILE])


def tuned_rival(spec: ProveStage, tuned: TuneReport, plan: ServerPlan) -> DrafterUse | None:
    """The rival's `DrafterUse`; None without one, and where speculation with it pays at no declared load: then it is
    `off`, which every comparison has."""
    if tuned.rival is None or spec.rival_dir is None:
        return None
    use = select_use(spec.model_copy(update={"drafter_dir": spec.rival_dir}), tuned.rival, plan)
    return None if use.setting == OFF else use


def select_use(spec: ProveStage, tuned: TuneReport, plan: ServerPlan) -> DrafterUse:
    """The endpoint's `DrafterUse`: the best setting at the lowest declared load that drafts, or off.

    It has the operating map where the engine can follow it; the map's settings are then measured at the other loads.
    """
    chart = tuned.map
    if chart is None:
        return DrafterUse(drafter_dir=spec.drafter_dir, setting=Setting(tree=tuned.winner))
    best = [chart.at(load).setting for load in sorted(spec.prove.concurrencies)]
    setting = next((candidate for candidate in best if candidate != OFF), OFF)
    followed = DrafterUse(drafter_dir=spec.drafter_dir, setting=setting, map=chart)
    if setting == OFF or plan.is_adaptive(followed):
        return followed
    # One setting at every load. n-gram lookup reads no drafter, so its use names no directory.
    return DrafterUse(drafter_dir=spec.drafter_dir if setting.method == "drafter" else None, setting=setting)


def variants_to_compare(spec: ProveStage, use: DrafterUse, stage: Stage,
                        rival: DrafterUse | None = None) -> DrafterUses:
    """The `DrafterUse` of every server. An incumbent whose drafter is missing is left out, with an event."""
    uses = {BASELINE: DrafterUse(), CANDIDATE: use}
    if use.map is not None and use.map.at(1).setting != use.setting:
        # Parity runs one prompt at a time, at which load the candidate would follow its map to another setting.
        uses[FIXED] = use.model_copy(update={"map": None})
    incumbent = spec.incumbent
    if incumbent is not None and incumbent.drafter_dir is not None and not Path(incumbent.drafter_dir).is_dir():
        stage.event("IncumbentGone", f"the incumbent's drafter, {incumbent.drafter_dir}, is missing: the candidate is "
                    "compared with no drafter alone", warning=True)
    elif incumbent is not None:
        uses[INCUMBENT] = incumbent
    if rival is not None:
        uses[RIVAL] = rival
    return uses


def select_prompts(spec: ProveStage, suites: Suites, among: Sequence[SuiteSpec]) -> list[Prompt]:
    """Prompts of some suites in turn, after those that selected the checkpoint where a suite is long enough."""
    share = -(-max(spec.prove.requests, spec.prove.parity_prompts) // len(among))
    drawn = {suite.name: select(suites[suite.name], suite.max_prompts, share) for suite in among}
    return [prompt for _, prompt in round_robin(drawn)]


def checks_of(spec: ProveStage, num_variants: int) -> list[_Check]:
    prove = spec.prove
    per_variant = prove.requests + _WARMUP_REQUESTS
    most = max(prove.concurrencies)
    loaded = 2 * num_under_load(prove.parity_prompts, most) if most > 1 else 0
    if spec.engine.kind == "embedded":  # on a GPU, SGLang's samples are many and short
        loaded += 2 * prove.parity_prompts
    checks = [_Check(ANSWERS, (4 if prove.system_prompt else 2) * prove.parity_prompts + loaded, _collect_answers)]
    for load in prove.concurrencies:
        checks.append(_Check(_load_check(load), num_variants * max(per_variant, fewest_requests(load) * _REPEATS),
                             partial(_check_load, load=load)))
    if prove.system_prompt:
        checks.append(_Check(CHANGED_PROMPT, 2 * (prove.requests // 2 + _WARMUP_REQUESTS), _check_changed_prompt))
    return checks


def _load_check(load: int) -> str:
    return f"load {load}"


def _run_all(proof: Proof, checks: Sequence[_Check]) -> None:
    """Run the checks without a result in the ledger. Servers are started only when at least one is left."""
    proof.total = sum(check.num_requests for check in checks)
    left = [check for check in checks if proof.result(check.name) is None]
    proof.done = proof.total - sum(check.num_requests for check in left)
    if not left:
        return
    stage, uses = proof.stage, proof.uses
    with measuring(stage) as disturbed:
        proof.pool = pool = ServerPool(proof.plan, uses, stage.out_dir / VARIANTS, stage, proof.history)
        try:
            # Start as many servers as fit. An incumbent or a rival that cannot start is left out; others are required.
            if pool.capacity < len(uses):
                stage.event("ServersInTurn", f"the memory holds {pool.capacity} of {len(uses)} servers at a time: "
                            "variants are measured one after the other, the one without a drafter before and after the "
                            "others")
            else:
                for name, error in pool.make_ready(list(uses)).items():
                    proof.leave_out(name, error)
                stage.event("ServersReady", f"{len(uses)} servers of the {proof.spec.engine.kind} engine answer: "
                            + ", ".join(f"{name} ({describe_use(use)})" if name != BASELINE else name
                                        for name, use in uses.items()))
            for check in left:
                stage.pause_point()
                proof.current = check.num_requests
                proof.ledger.append(run_check(proof, pool, check))
                proof.done += check.num_requests
        finally:
            pool.stop()
    proof.disturbed = "".join(disturbed)


def run_check(proof: Proof, pool: ServerPool, check: _Check) -> CheckResult:
    """Run a check; once more when it failed or a server ended in it, since requests that are lost with a server say
    nothing about the drafter."""
    try:
        result = check.run(proof)
    except (EngineFailed, EndpointUnusable):
        _any_ended(pool)
    else:
        if not _any_ended(pool):
            return result
    proof.last_try = True
    try:
        return check.run(proof)
    finally:
        proof.last_try = False
        _any_ended(pool)


def _any_ended(pool: ServerPool) -> bool:
    """Whether servers have ended; they are started again when they are next used.

    Raises EngineFailed when one has ended too often: a check in which it ended has no result.
    """
    return sum(pool.has_ended(name, 0.2) for name in pool.resident) > 0  # a sum: all of them are asked


def _collect_answers(proof: Proof) -> CheckResult:
    """Answers for parity: one user at a time, when an engine's rounds depend on the request alone, and under load."""
    spec = proof.spec
    done = itertools.count(1)

    def pause() -> None:
        proof.stage.pause_point()
        proof.report_progress(next(done), proof.current, "answers")

    def answers(server: ServerProcess, system_prompt: str | None) -> tuple[Served, ...]:
        return tuple(request_answers(spec.engine.kind, server.url, proof.plan.model,
                                     parity_prompts(proof, system_prompt), spec.prove.max_new_tokens, pause=pause))

    def loaded(name: str, requests: Sequence[LoadRequest]) -> tuple[Served, ...]:
        """Of the server that follows the load, as callers will have it."""
        return tuple(request_under_load(spec.engine.kind, proof.server(name).url, proof.plan.model, requests,
                                        max(spec.prove.concurrencies), pause))

    changed = spec.prove.system_prompt
    plain = proof.server(BASELINE)
    differences: tuple[str, ...] = ()
    if spec.engine.kind == "sglang":  # the embedded engine renders with the same code
        tokenizer = ChatTokenizer(resolve(spec.target))
        sent = [(prompt.messages, prompt.tools) for prompt in proof.prompts[:_COMPARED_PROMPTS]]
        differences = compare_prompts(plain.url, proof.plan.model, tokenizer, [*probes(tokenizer.form), *sent])
    alone = answers(plain, None)
    collected = Answers(plain=alone, drafted=(), prompt_differences=differences)
    without = collected.model_copy(update={
        "changed_plain": answers(plain, changed) if changed else (),
        "loaded_plain": loaded(BASELINE, loaded_requests(proof, alone)),
        "sampled_plain": loaded(BASELINE, sampled_of(proof))})
    drafted = proof.server(proof.parity_variant)
    try:
        collected = without.model_copy(update={
            "drafted": answers(drafted, None), "changed_drafted": answers(drafted, changed) if changed else (),
            "loaded_drafted": loaded(CANDIDATE, loaded_requests(proof, alone)),
            "sampled_drafted": loaded(CANDIDATE, sampled_of(proof))})
    except EngineFailed as error:
        if not proof.last_try:
            raise
        collected = collected.model_copy(update={"error": error.message})
    return CheckResult(question=ANSWERS, answers=collected)


def loaded_requests(proof: Proof, alone: Sequence[Served]) -> list[LoadRequest]:
    """The greedy requests at the highest declared load; none where that is one user."""
    prove = proof.spec.prove
    in_flight = max(prove.concurrencies)
    return [] if in_flight == 1 else requests_under_load(
        proof.spec.engine.kind, parity_prompts(proof), alone, prove.max_new_tokens, in_flight,
        ChatTokenizer(resolve(proof.spec.target)).decode, [prompt.tools for prompt in proof.prompts])


def sampled_of(proof: Proof) -> list[LoadRequest]:
    """The requests at temperature 1; none where SGLang would answer them greedily."""
    if proof.spec.engine.kind == "sglang" and (proof.plan.machine or detect_hardware()).platform == "cpu":
        return []
    return sampled_requests(proof.spec.engine.kind, parity_prompts(proof), proof.spec.prove.max_new_tokens)


def parity_prompts(proof: Proof, system_prompt: str | None = None) -> list[list[int]]:
    """Token ids of the prompts for parity; with a system prompt in place of their own, if one is given."""
    tokenizer = ChatTokenizer(resolve(proof.spec.target))
    chosen = proof.prompts[: proof.spec.prove.parity_prompts]
    return [tokenizer.render(prompt.messages_with(system_prompt), list(prompt.tools) or None) for prompt in chosen]


def record_answers(prompts: Sequence[Prompt], answers: Sequence[Served], tokenizer: ChatTokenizer,
                   max_new_tokens: int) -> RecordedAnswers:
    """The undrafted answers to the prompts that a comparison can send: one user message, of its length at most.

    answers   of the first prompts, of at most `max_new_tokens` each
    """
    recorded: dict[str, RecordedAnswer] = {}
    for prompt, answer in zip(prompts, answers, strict=False):
        (first, *others) = prompt.messages
        text = first.get("content")
        if others or prompt.tools or first.get("role") != "user" or not isinstance(text, str):
            continue
        if 0 < len(text) <= MAX_PROMPT and len(recorded) < MOST_RECORDED:
            ids = answer.token_ids[:MAX_ANSWER]
            is_cut = len(ids) == min(max_new_tokens, MAX_ANSWER) and ids[-1] not in tokenizer.eos_ids
            recorded.setdefault(text, RecordedAnswer(prompt=text, text=tokenizer.decode(ids), num_tokens=len(ids),
                                                     is_cut=is_cut))
    return RecordedAnswers(answers=tuple(recorded.values()))


def judge_answers(proof: Proof, answers: Answers) -> CheckResult:
    """The parity of answers that the servers have given."""
    spec = proof.spec
    kind, dtype, setting = spec.engine.kind, spec.target.dtype, proof.uses[proof.parity_variant].setting
    tree = setting.tree
    assert tree is not None
    if answers.error:
        return CheckResult(question=PARITY, parity=report_without_answers(
            kind, tree, len(answers.plain), answers.error))
    target_dir = resolve(spec.target)
    reference = judge = None
    why = why_not_held(target_dir, dtype)
    if why is not None:
        why = f"rounds not replayed: the reference does not hold the target ({why})"
    elif holds_mtp_layers(own := read_json(Path(spec.drafter_dir) / "config.json")) and family_of(own) is None:
        why = "rounds not replayed: Eyrie does not compute the target's MTP layers"
        judge = cache(lambda: open_judge(target_dir, dtype))
    elif kind == "sglang" and (quantised := quantised_matrices(target_dir)) and quantised[0].rounds_activations:
        why = "rounds not replayed: SGLang also quantises the activations of this target, which the reference does not"
        judge = cache(lambda: open_judge(target_dir, dtype))
    elif computed_by_reference(config := read_json(target_dir / "config.json")):
        reference = Reference(target_dir, Path(spec.drafter_dir), kind, tree, dtype)
    else:
        why = f"rounds not replayed: the reference does not compute {config.get('model_type')}"
        judge = cache(lambda: open_judge(target_dir, dtype))  # loaded when an answer differs
    if setting.method == "ngram":
        why = "n-gram lookup has no weights that could be misconfigured: its rounds are not compared with the reference"

    def divergence(title: str, prompt: Sequence[int], plain: Served, drafted: Served,
                   seed: int | None = None, constrained: bool = False) -> tuple[str, bool]:
        """`seed` is that of a request at temperature 1."""
        two = plain.token_ids, drafted.token_ids
        if two[0] == two[1]:
            place = first_difference(plain.text or "", drafted.text or "")
            return f"{title}: the tokens are equal, the text differs at character {place}", False
        source = reference.target if reference is not None else judge() if judge is not None else None
        temperature = 0.0 if seed is None else 1.0
        if source is not None and (difference := explain(
                source, title, prompt, *two, temperature=temperature, seed=seed or 0,
                constrained=constrained)) is not None:
            return difference.line(dtype), difference.is_tie(dtype)
        return f"{title}: position {first_difference(*two)}", False

    def of_request(request: LoadRequest, plain: Served, drafted: Served) -> tuple[str, bool]:
        return divergence(request.title, request.prompt_ids, plain, drafted, request.seed, bool(request.json_schema))

    def compare(name: str, prompts: list[list[int]], plain: Sequence[Served], drafted: Sequence[Served],
                note: str) -> ParityReport:
        return compare_answers(kind, tree, plain, drafted, lambda index: divergence(
            f"{name} {index}", prompts[index], plain[index], drafted[index]), note)

    prompts = parity_prompts(proof)
    if reference is not None and setting.method == "drafter":
        parity = reference.replay_parity(prompts, answers.plain, answers.drafted, proof.stage.pause_point)
    else:
        parity = compare("prompt", prompts, answers.plain, answers.drafted, why or "")
    changed = None
    if answers.changed_plain:
        changed = compare("changed prompt", parity_prompts(proof, spec.prove.system_prompt), answers.changed_plain,
                          answers.changed_drafted, "with another system prompt; its rounds are not replayed")
    loaded = compare_under_load(
        kind, tree, loaded_requests(proof, answers.plain), answers.loaded_plain, answers.loaded_drafted, of_request,
        max(spec.prove.concurrencies)) if answers.loaded_drafted else None
    sampled = compare_sampled(
        kind, sampled_of(proof), answers.sampled_plain, answers.sampled_drafted, answers.plain, of_request) \
        if answers.sampled_drafted else sampled_not_compared(kind, GREEDY_ONLY)
    return CheckResult(question=PARITY, parity=parity, changed_parity=changed, loaded_parity=loaded,
                       sampled_parity=sampled)


def load_spec(spec: ProveStage, loads: Sequence[int], requests: int, repeats: int,
              system_prompt: str | None = None) -> LoadSpec:
    """The requests of the load test: `repeats` blocks of so many each."""
    return LoadSpec(
        concurrencies=tuple(loads), requests=requests, repeats=repeats, warmup_requests=_WARMUP_REQUESTS,
        max_new_tokens=spec.prove.max_new_tokens, system_prompt=system_prompt,
        seed=spec.benchmark.seed)


def _check_load(proof: Proof, load: int) -> CheckResult:
    variants = [name for name in proof.uses if name != FIXED]
    policy, prove, chart = proof.spec.promotion, proof.spec.prove, proof.uses[CANDIDATE].map
    is_off = chart is not None and chart.at(load).setting == OFF

    def standing(ratios: PairedRatios, candidate: LevelResults, baseline: LevelResults) -> Standing:
        if is_off:
            return no_slowdown_standing(policy, ratios.throughput_interval)
        return load_standing(policy, ratios, candidate, baseline)

    report = proof.measure(load, prove.requests, prove.most_pairs, variants, standing)
    for pair in report.comparisons:
        first = "" if pair.ttft_p99_ratio is None else f", time to first token (p99) {pair.ttft_p99_ratio:.2f}x"
        first += f", {pair.pairs} pairs of blocks" if pair.pairs else ""
        interval = f"{pair.throughput_interval.low:.2f}-{pair.throughput_interval.high:.2f}"
        proof.stage.event("LoadMeasured", f"{users(load)}: {pair.variant} {pair.throughput_ratio:.2f}x ({interval}) "
                          f"the tokens per second of {pair.baseline}{first}")
    for note in report.notes:
        proof.stage.event("LoadNote", note, warning=True)
    return CheckResult(question=_load_check(load), load=report)


def _check_changed_prompt(proof: Proof) -> CheckResult:
    prove = proof.spec.prove
    policy = proof.spec.promotion
    # Half of the requests: enough to see whether acceptance collapses, which needs no narrow interval.
    report = proof.measure(
        min(prove.concurrencies), prove.requests // 2, -(-prove.most_pairs // 2), (BASELINE, CANDIDATE),
        lambda ratios, _candidate, _baseline: changed_prompt_standing(policy, ratios.throughput_interval),
        prove.system_prompt)
    for pair in report.comparisons:
        interval = f"{pair.user_interval.low:.2f}-{pair.user_interval.high:.2f}"
        proof.stage.event("ChangedPrompt", f"with another system prompt: {pair.user_ratio:.2f}x ({interval}) for a "
                          f"user, {pair.identical} of {pair.compared} answers identical")
    return CheckResult(question=CHANGED_PROMPT, load=report)


def describe_use(use: DrafterUse) -> str:
    return use.setting.label() + (" by load" if use.map is not None else "")


def users(load: int) -> str:
    """`1 user`, `4 users at once`."""
    return "1 user" if load == 1 else f"{load} users at once"


if __name__ == "__main__":
    sys.exit(run_program(ProveStage, prove))
