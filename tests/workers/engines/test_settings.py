"""Settings and operating maps in the server's command line, rendered and parsed."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.engines.process import EngineCommand, batch_size_schedule
from eyrie_workers.engines.server import load, parse_options
from eyrie_workers.speculation.engine import Engine, Request
from tests.tiny import tiny_target

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
TREE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
DRAFTER = Path("/drafter")


def loaded(target: Path, **use: Any) -> Engine:
    """The engine of a server that is started with a `DrafterUse`."""
    argv = EngineCommand(target=target, model="m", use=DrafterUse(**use), max_concurrency=3, threads=1).argv()[3:]
    return load(parse_options(argv)).engine


def operating_map(*settings: Setting) -> OperatingMap:
    return OperatingMap(points=tuple(
        OperatingPoint(concurrency=2**i, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
        for i, setting in enumerate(settings)))


def test_the_server_decodes_with_the_setting_of_the_rendered_command(target: Path, drafter: Path) -> None:
    plain = loaded(target)
    assert (plain.drafter, plain.tree) == (None, None)
    drafted = loaded(target, drafter_dir=str(drafter), setting=Setting(tree=TREE))
    assert drafted.drafter is not None
    assert not isinstance(drafted.drafter, NgramDrafter)
    assert drafted.tree == TREE
    ngram = loaded(target, drafter_dir=str(drafter), setting=Setting(method="ngram", tree=TREE))
    assert isinstance(ngram.drafter, NgramDrafter)
    assert loaded(target, drafter_dir=str(drafter), setting=OFF).drafter is None


def test_a_map_with_one_drafter_becomes_a_batch_size_schedule() -> None:
    assert batch_size_schedule(operating_map(Setting(tree=TREE), Setting(tree=CHAIN), OFF)) == (
        "drafter", {1: TREE, 2: CHAIN, 4: None})


def test_a_map_with_two_methods_or_one_setting_has_no_schedule() -> None:
    ngram, trained = Setting(method="ngram", tree=CHAIN), Setting(tree=TREE)
    assert batch_size_schedule(operating_map(ngram, trained, OFF)) is None
    assert batch_size_schedule(operating_map(trained, trained)) is None
    assert batch_size_schedule(operating_map(OFF, OFF)) is None


def test_a_loaded_engine_changes_its_tree_with_the_batch_size(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "llama", initializer_range=0.05)
    ngram = Setting(method="ngram", tree=CHAIN)
    points = tuple(OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
                   for load, setting in ((1, ngram), (3, OFF)))
    engine = loaded(target, setting=ngram, map=OperatingMap(points=points))
    assert isinstance(engine.drafter, NgramDrafter)
    assert engine.tree == CHAIN  # at one row
    requests = [Request(f"r{i}", [7 + i, 8, 9], 20 + 10 * i) for i in range(3)]
    plain = [answer.token_ids for answer in Engine(engine.target).generate(requests)]
    for request in requests:
        engine.submit(request)
    done: dict[str, list[int]] = {}
    drafted_at = set()
    while len(done) < 3:
        rows = engine.num_running
        nodes = engine.stats.nodes
        said = engine.step()
        if rows == len(said) and engine.stats.nodes - nodes > 1:
            drafted_at.add(rows)
        done |= {one.id: one.generation.token_ids for one in said if one.generation is not None}
    assert [done[request.id] for request in requests] == plain
    assert drafted_at
    assert 3 not in drafted_at


@pytest.mark.parametrize("use", [
    '{"setting": {"tree": {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4}}}', "no JSON",
    '{"setting": {"method": "ngram", "tree": {"num_steps": 3, "top_k": 1, "num_draft_tokens": 9}}}'])
def test_an_invalid_command_line_is_rejected(use: str) -> None:
    with pytest.raises(InvalidInput, match="--use"):
        parse_options(["--target", "t", "--use", use])
