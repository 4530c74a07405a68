"""`eyrie demo`: one whole job on this machine, from a REST call to an endpoint.

It starts a control plane with its own home, posts a job for the shipped target, shows its progress, and prints the
report with an explanation. The job has no special treatment: if its drafter is not promoted, the output says so and
why. The endpoint keeps running; `stop` stops everything. """

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts import write_model
from eyrie_api.cli import chat
from eyrie_api.cli.plots import figures_of_job, write_figures
from eyrie_api.cli.tables import times
from eyrie_api.cli.verbs import Screen, running_plane
from eyrie_api.cli.watch import verdict, watch
from eyrie_api.client import Client
from eyrie_api.contract.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineKind, EngineSpec, SamplingSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.load import Quantiles
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import BenchmarkReport
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Endpoint, Job, JobReport
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.errors import EyrieError, Permanent
from eyrie_api.processes import free_port
from eyrie_api.quantities import duration
from eyrie_api.settings import Settings
from eyrie_operator.cli.detached import is_ready, start_detached, stop_plane

HOME = Path(".eyrie/demo")
REPORT_FILE = "report.json"
_SERVING_S = 30.0
"""Beyond the time in which the engine has to become healthy."""

_SUITES = ("chat", "math", "code", "tools")

QUICKSTART = "quickstart"
"""The shipped target."""


class DemoFailed(Permanent):
    """The demo failed."""


def demo_job(short: bool, engine: EngineKind = "embedded", target: str = QUICKSTART) -> JobSpec:
    """The job: a drafter for the target. `short` keeps every stage and shrinks each.

    In SGLang every measured setting is a server of its own, which takes half a minute to start on two cores: the grid
    is smaller there. The budget counts the measurements alone.
    """
    sglang = engine == "sglang"
    depths = (3, 5) if short or sglang else (2, 3, 4, 5, 7)
    return JobSpec(
        name="demo",
        engine=EngineSpec(kind=engine),
        target=TargetSpec(model=target, dtype="float32"),
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=160 if short else 600),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32),
        # Of the target's 2048 tokens: 1024 cover 97 % of unseen answers, 1536 cover 98 %, and what is not covered can
        # never be drafted.
        drafter=DrafterSpec(draft_vocab_size=1536),
        train=TrainSpec(learning_rate=2e-3, epochs=8.0 if short else 7.0, num_checkpoints=2,
                        max_tokens_per_batch=512 if short else 1024),
        benchmark=BenchmarkSpec(
            suites=tuple(SuiteSpec(name=name, path=f"quickstart:{name}", max_prompts=2) for name in _SUITES),
            tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6),
            max_new_tokens=48 if short else 96, warmup_prompts=1,
        ),
        prove=ProveSpec(concurrencies=(1, 4), requests=8, most_pairs=40 if short else 100,
                        max_new_tokens=48 if short else 64, parity_prompts=4 if short else 6),
        # Predictions cost the same for a wide grid; the races are what takes time.
        tune=TuneSpec(num_steps=depths, top_k=(1,) if short else (1, 2), num_draft_tokens=(10,),
                      max_prompts=4 if short else 6, budget_s=(4.0 if sglang else 1.0) * (6.0 if short else 10.0)),
    )


def play(home: Path, screen: Screen, job_spec: JobSpec) -> None:
    """Run a job in a home of its own; the endpoint keeps running. Raises EyrieError when the job fails."""
    stop(home, screen, quietly=True)
    shutil.rmtree(home, ignore_errors=True)
    plane = start_detached(Settings(home=home, port=free_port()))
    screen.note(f"follow it in a browser: {plane.url}  (log: {home / 'plane.log'})")
    with Client(plane.url) as client:
        created = client.create_job(job_spec)
        screen.note(f"POST {plane.url}/v1alpha1/jobs  ->  202, job {created.id}\n")
        job = watch(client, created.id, screen)
        verdict(job)
        endpoint = wait_serving(client, job)
        figures = figures_of_job(client, job.id)
        write_figures(figures, home / "plots", "svg", "light")
        plots = write_figures(figures, home / "plots", "png", "light")
        report = client.report(job.id)
    write_model(home / REPORT_FILE, report)
    reply = None
    if endpoint is not None:  # the request of the printed curl command, which is thereby known to work
        chatting = chat.ChatSettings(base_url=endpoint.url or "", model=endpoint.model, temperature=0.0, max_tokens=96)
        reply = chat.ask(chatting, [{"role": "user", "content": chat.QUESTION}], lambda _text: None)
    if screen.as_json:
        screen.show(report, "")
        return
    screen.out.print(Group(Text(), closing(report, reply), Text(), where(job, report, endpoint, plots, home)))
    if endpoint is not None:
        # Outside of any table and unwrapped, so that it can be copied.
        screen.out.print(Text("\nTry it:", "bold"))
        screen.out.print(chat.curl_line(endpoint.url or "", endpoint.model), soft_wrap=True)
    screen.out.print("\nStop it: make demo-stop")


def stop(home: Path, screen: Screen, *, quietly: bool = False) -> None:
    """Stop a demo's endpoints and control plane; succeeds when nothing runs."""
    from eyrie_operator.control_plane import stop_orphans

    plane = running_plane(home)
    if plane is None:
        if (home / "eyrie.db").exists():  # the control plane may have been killed: its engines still run
            stop_orphans(Settings(home=home))
        if not quietly:
            screen.show({"stopped": False}, "No demo is running.")
        return
    try:
        with Client(plane.url) as client:
            for endpoint in client.endpoints().items:
                client.off(endpoint.name)
    except EyrieError as error:  # a control plane that does not respond is stopped all the same
        screen.note(f"endpoints could not be switched off: {error.message}")
    stop_plane(plane)
    if not quietly:
        screen.show({"stopped": True}, f"The demo is stopped; its report is in {home}.")


def wait_serving(client: Client, job: Job) -> Endpoint | None:
    """Wait until the endpoint responds; None when the job promoted nothing. Raises DemoFailed."""
    if job.status.endpoint is None:
        return None
    timeout_s = EndpointServeSpec(**dict(job.spec.serve), engine=job.spec.engine).healthy_within_s + _SERVING_S
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        endpoint = client.endpoint(job.status.endpoint)
        if endpoint.url is not None and endpoint.active_revision is not None and is_ready(f"{endpoint.url}/models"):
            return endpoint
        time.sleep(0.3)
    raise DemoFailed(f"endpoint {job.status.endpoint!r} did not respond within {timeout_s:g} s",
                     f"eyrie endpoints show {job.status.endpoint} shows its conditions")


def closing(report: JobReport, reply: chat.Reply | None) -> RenderableType:
    """The result of a job that has succeeded, for readers without prior knowledge. Pure."""
    tuned, decision, proof = report.tune, report.decision, report.prove
    assert tuned is not None
    assert decision is not None
    assert proof is not None
    tried = [] if reply is None else [Text(), Text.assemble((f"{chat.QUESTION}  ", "bold"),
                                                                " ".join(reply.content.split())),
                                      Text(reply.footer(), "dim")]
    measured = [Text(), *suites_table(tuned.final), *proof_words(proof), *tried]
    if not decision.promote:
        serves = "until a measurement decides" if decision.undecided else "since none is faster"
        return Group(Text.assemble(("No drafter was promoted: ", "bold yellow"), summarize_decision(decision)),
                     Text(f"The target serves without a drafter, {serves}."), *measured)
    cells, tree = tuned.final.cells, tuned.winner
    promoted = next(entry for entry in report.leaderboard if entry.tuned and entry.checkpoint == tuned.checkpoint)
    # How many answers equal the undrafted engine's, by kind of sampling.
    kinds = {"greedy": [cell for cell in cells if cell.temperature == 0.0],
             "sampled": [cell for cell in cells if cell.temperature > 0.0]}
    identical = [f"{sum(cell.identical for cell in those)} of {sum(cell.prompts for cell in those)} {kind}"
                 for kind, those in kinds.items() if those]
    same = all(cell.identical == cell.prompts for cell in cells if cell.compared)
    speedups = [f"{times(ratio)} {kind}" for kind, ratio in (
        ("greedy", promoted.speedup_greedy), ("sampled", promoted.speedup_sampled)) if ratio is not None]
    return Group(
        Text.assemble(("Faster, with the same output. " if same else "Faster, but not with the same output. ",
                       "bold green" if same else "bold yellow"),
                      "A drafter was trained on the target's own answers, measured, and now serves."),
        Text(),
        pairs([
            ("speed-up", f"{', '.join(speedups)}, against the same engine without a drafter "
             f"({tuned.final.baseline_tokens_per_s:.0f} tok/s on the same prompts)"),
            ("same output", f"{' and '.join(identical)} answers identical, token by token"),
            ("drafter", f"{tuned.checkpoint}: {promoted.tau:.2f} tokens per target pass (tau) at "
             f"depth {tree.num_steps}, top-k {tree.top_k}, {tree.num_draft_tokens} "
             "draft tokens, mean over suites and temperatures"),
            ("baseline", baseline_words(report.benchmark)),
        ]),
        *measured)


def baseline_words(benchmarks: Sequence[BenchmarkReport]) -> str:
    """The engine without a drafter against `transformers` generate, measured together. Pure."""
    compared = next((each for each in benchmarks if each.transformers_generate_tokens_per_s is not None), None)
    if compared is None:
        return "transformers generate was not measured"
    return (f"{compared.transformers_baseline_tokens_per_s:.0f} tok/s without a drafter, "
            f"{compared.transformers_generate_tokens_per_s:.0f} tok/s by transformers generate: the same "
            f"{compared.transformers_prompts} prompts, greedy, in turn")


def suites_table(final: BenchmarkReport) -> list[RenderableType]:
    """The tuned drafter by suite and temperature. Pure."""
    table = _table("SUITE", "TEMP", "SPEED-UP", "TAU", "REPEATED", "TAU, NEW TEXT", "TOK/S", "IDENTICAL")
    for cell in final.cells:
        repeated = "-" if cell.repeated_share is None else f"{cell.repeated_share:.0%}"
        of_new_text = "-" if cell.tau_of_new_text is None else f"{cell.tau_of_new_text:.2f}"
        table.add_row(cell.suite, f"{cell.temperature:g}", times(cell.speedup), f"{cell.tau:.2f}", repeated,
                      of_new_text, f"{cell.tokens_per_s:.0f}", f"{cell.identical}/{cell.prompts}")
    tree = final.cells[0].tree
    assert tree is not None  # the winner of tuning
    return [Text(f"{final.checkpoint} by suite, at depth {tree.num_steps}, top-k {tree.top_k}, {tree.num_draft_tokens} "
                 "draft tokens:"), table]


def proof_words(proof: ProveReport) -> list[RenderableType]:
    """Measurements in the serving engine, by variant. Pure."""
    parity = proof.parity
    if parity is None:
        return [Text(), Text(f"Not measured in the serving engine: {proof.skipped}")]
    table = _table("USERS", "SPEED-UP (95 %)", "TOK/S (OFF)", "FIRST TOKEN P99 (OFF)")
    for load, prompt in ((proof.load, ""), (proof.changed_prompt, ", another system prompt")):
        cells = {} if load is None else {(level.variant, level.level): level.total for level in load.levels}
        for pair in () if load is None else load.comparisons:
            mine, plain = cells[pair.variant, pair.level], cells[pair.baseline, pair.level]
            users = f"{pair.level:g}{prompt or (' at once' if pair.level > 1 else '')}"
            table.add_row(users if pair.variant == "candidate" else f"{users}, {pair.variant}",
                          f"{times(pair.throughput_ratio)} ({pair.throughput_interval.low:.2f}-"
                          f"{pair.throughput_interval.high:.2f})",
                          f"{mine.tokens_per_s:.0f} ({plain.tokens_per_s:.0f})",
                          f"{milliseconds(mine.ttft_s)} ({milliseconds(plain.ttft_s)})")
    holds = "serves what was trained" if parity.passed else "does NOT serve what was trained"
    tau = parity.reference_tau
    reference = "" if tau is None else f" and {tau:.2f} in the reference engine"
    setting = proof.use.setting.label() + ("" if proof.use.map is None else ", by load")
    others = [Text("; ".join(compared.reasons)) for compared in (proof.loaded_parity, proof.sampled_parity)
              if compared is not None]
    return [Text(), Text(
        f"The {proof.engine} engine {holds}: {parity.identical} of {parity.prompts} answers are identical "
        f"with the drafter, tau is {parity.tau:.2f} there{reference}."), *others,
        Text(f"Under load, greedy, at {setting}:"), table]


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def milliseconds(seconds: Quantiles | None) -> str:
    """The 99th percentile in milliseconds, or `-`."""
    return "-" if seconds is None else f"{1000 * seconds.p99:.0f} ms"


def where(job: Job, report: JobReport, endpoint: Endpoint | None, plots: list[Path], home: Path) -> RenderableType:
    """Time by stage, and paths of the report and plots. Pure."""
    stages = ", ".join(f"{name} {duration(value)}" for name, value in report.seconds.items() if name != "total")
    assert job.status.finished_at is not None
    total_s = (job.status.finished_at - job.created_at).total_seconds()
    known = [("time", f"{duration(total_s)} ({stages})"), ("report", str(home / REPORT_FILE))]
    if plots:
        known.append(("plots", f"{plots[0].parent}/*.png ({len(plots)})"))
    if endpoint is not None:
        known.append(("endpoint", f"{endpoint.url}  (model {endpoint.model})"))
    return pairs(known)


def pairs(known: list[tuple[str, str]]) -> RenderableType:
    """Names and values, aligned."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, words in known:
        grid.add_row(name, words)
    return grid
