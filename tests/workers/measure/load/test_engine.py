"""The load generator against the real embedded engine, drafting by n-gram lookup on a tiny target."""

from collections.abc import Iterator

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.load import LoadSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_workers.engines.process import EngineCommand, EngineProcess, start_engine
from eyrie_workers.measure.load.client import LoadEndpoint
from eyrie_workers.measure.load.run import run_load
from tests.tiny import tiny_target
from tests.workers.measure.load.servers import prompts


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    target = tiny_target(tmp_path_factory.mktemp("target") / "tiny")
    setting = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
    started = start_engine(EngineCommand(target=target, model="tiny", use=DrafterUse(setting=setting),
                                         max_concurrency=4, threads=1), tmp_path_factory.mktemp("engine"))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


def test_the_engines_tokens_rounds_and_ids_are_counted(engine: EngineProcess) -> None:
    url = f"{engine.url}/v1"
    # Long enough for a random model to begin to repeat itself, which is what the n-grams find.
    spec = LoadSpec(concurrencies=(2,), requests=4, max_new_tokens=128, warmup_requests=0)
    report = run_load([LoadEndpoint("off", url, "tiny"), LoadEndpoint("candidate", url, "tiny")], prompts(4), spec)
    for level in report.levels:
        assert (level.total.completed, level.total.failed) == (4, {})
        assert level.total.tau is not None
        assert level.total.tau_interval is not None
        assert level.total.tau_interval.low <= level.total.tau <= level.total.tau_interval.high
        # The first token comes with the prompt; every other one from a round, the last of which may be cut short.
        rounds = sum(level.total.accepted_histogram)
        emitted = rounds + sum(k * n for k, n in enumerate(level.total.accepted_histogram))
        assert level.total.output_tokens - level.total.completed <= emitted
    # Greedy and the same engine: the same ids.
    assert [(c.compared, c.identical) for c in report.comparisons] == [(4, 4)]
