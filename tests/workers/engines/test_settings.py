"""Settings and operating maps in the server's command line, rendered and parsed."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.tuning import OFF, OperatingMap, OperatingPoint, Setting
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.engines.process import EngineCommand, batch_size_schedule
from eyrie_workers.engines.server import ServerOptions, load, parse_options
from eyrie_workers.speculation.engine import Engine, Request
from tests.tiny import tiny_target

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
TREE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
DRAFTER = Path("/drafter")


def parsed(**what: Any) -> ServerOptions:
    return parse_options(EngineCommand(target="t", model="m", **what).argv()[3:])


def operating_map(*settings: Setting) -> OperatingMap:
    return OperatingMap(points=tuple(
        OperatingPoint(concurrency=2**i, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
        for i, setting in enumerate(settings)))


@pytest.mark.parametrize(("command", "method", "tree", "drafter"), [
    ({}, "off", None, None),
    ({"drafter": DRAFTER, "tree": TREE}, "drafter", TREE, DRAFTER),
    ({"drafter": DRAFTER, "setting": Setting(tree=CHAIN), "tree": TREE}, "drafter", CHAIN, DRAFTER),
    ({"drafter": DRAFTER, "setting": Setting(method="ngram", tree=TREE)}, "ngram", TREE, None),
    ({"drafter": DRAFTER, "setting": OFF}, "off", None, None),
])
def test_the_server_parses_the_rendered_command(command: dict[str, Any], method: str, tree: DraftTreeShape | None,
                                                 drafter: Path | None) -> None:
    options = parsed(**command)
    assert (options.method, options.tree, options.drafter) == (method, tree, drafter)
    assert not options.trees_by_batch_size


def test_a_map_with_one_drafter_becomes_a_batch_size_schedule() -> None:
    options = parsed(drafter=DRAFTER, map=operating_map(Setting(tree=TREE), Setting(tree=CHAIN), OFF))
    assert options.method == "drafter"
    assert options.trees_by_batch_size == {1: TREE, 2: CHAIN, 4: None}


def test_a_map_with_two_methods_or_one_setting_has_no_schedule() -> None:
    ngram, trained = Setting(method="ngram", tree=CHAIN), Setting(tree=TREE)
    assert batch_size_schedule(operating_map(ngram, trained, OFF)) is None
    assert batch_size_schedule(operating_map(trained, trained)) is None
    assert batch_size_schedule(operating_map(OFF, OFF)) is None
    options = parsed(drafter=DRAFTER, setting=trained, map=operating_map(trained, ngram))
    assert (options.tree, options.trees_by_batch_size) == (TREE, {})


def test_a_loaded_engine_changes_its_tree_with_the_batch_size(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", "llama", initializer_range=0.05)
    options = parse_options(["--target", str(target), "--method", "ngram", "--trees-by-batch-size", "1=3/1/4,3=off",
                             "--max-concurrency", "3", "--threads", "1"])
    engine = load(options).engine
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


@pytest.mark.parametrize(("argv", "says"), [
    (["--method", "drafter"], "has no drafter"),
    (["--method", "ngram", "--trees-by-batch-size", "1=deep"], "'1=deep' is not a slot"),
    (["--method", "ngram", "--trees-by-batch-size", "many=3/1/4"], "'many=3/1/4' is not a slot"),
    (["--method", "ngram", "--trees-by-batch-size", "1=3/1/9"], "num_draft_tokens 9 does not fit a chain")])
def test_an_invalid_command_line_is_rejected(argv: list[str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_options(["--target", "t", *argv])
