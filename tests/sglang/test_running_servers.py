"""`eyrie certify --off URL --drafted URL` on real SGLang servers: what it reads of one, a whole comparison of two."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.prove import ProveSpec
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.running_servers import Connection, answer_rows, ask, judge_tie, look, main
from eyrie_workers.sglang.process import SglangServer
from tests.sglang.servers import drafting, flags, serving


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with serving(flags(), tmp_path_factory.mktemp("off")) as server:
        yield server


def test_real_log_probabilities_judge_an_answer_token_by_token(off: SglangServer) -> None:
    connection = Connection(off.url, None)
    try:
        server = look(connection, "--off", None)
        facts = server.facts
        assert (facts["engine"], facts["dtype"], facts["context"]) == ("sglang 0.5.23", "float32", "1024")
        assert server.drafts == ""
        answer = ask(connection, server, Prompt("p", "s", ({"role": "user", "content": "Name three towns."},)), 8)
        assert answer.prompt_ids is not None
        assert answer.token_ids is not None
        assert answer.num_prompt_tokens == len(answer.prompt_ids)
        rows = answer_rows(connection, server, answer.prompt_ids, answer.token_ids, 0)
        assert [max(row, key=lambda token: row[token]) for row in rows] == list(answer.token_ids)
        assert [len(row) for row in rows] == [5] * len(answer.token_ids)
        # As if the drafter had led to another first token: no near-tie of the target's choice.
        other = replace(answer, token_ids=(answer.token_ids[0] + 1, *answer.token_ids[1:]))
        assert judge_tie(connection, server, answer, other) is False
    finally:
        connection.close()


@pytest.mark.slow
def test_two_running_servers_are_compared_and_judged(off: SglangServer, drafter: Path, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    proof = ProveSpec(concurrencies=(1, 4), requests=8, most_pairs=6, max_new_tokens=24, parity_prompts=4)
    chain = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
    with serving(flags(*drafting(drafter, chain)), tmp_path) as drafted:
        code = main(["--off", off.url, "--drafted", drafted.url, "--prompts", "quickstart:chat", "--prompts",
                     "quickstart:math", "--prove", proof.model_dump_json(), "--json"])
    certificate = json.loads(capsys.readouterr().out)
    assert code == certificate["exit_code"]
    # How fast two servers are next to other work is not what this test decides.
    assert certificate["verdict"] in ("faster", "not-faster", "undecided"), certificate["summary"]
    assert [(part["users"], part["compared"], part["by"]) for part in certificate["answers"]] == [
        (1, 4, "token ids"), (4, 4, "token ids")]
    assert all(part["identical"] + part["near_ties"] + part["as_undrafted"] == 4 for part in certificate["answers"])
    assert (certificate["off"]["drafts"], certificate["drafted"]["drafts"]) == ("", "EAGLE3 3/1/4")
