"""What `eyrie certify --off URL --drafted URL` reads of a real SGLang server: facts, answers, log probabilities."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.running_servers import Connection, answer_rows, ask, judge_tie, look
from eyrie_workers.sglang.process import SglangServer
from tests.sglang.servers import flags, serving


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
