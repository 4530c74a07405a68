"""What every `DecodingEngine` does, whichever it is: `check_contract` is run on both implementations.

The engines decode one target greedily, with the variants `off`, `drafted` (a drafter in a chain) and `lookup` (n-gram).
"""

from collections.abc import Sequence
from dataclasses import replace

from eyrie_api.contract.tuning import DrafterUse
from eyrie_workers.engines.decoding_engine import Answer, DecodingEngine
from eyrie_workers.speculation.requests import Request

OFF, DRAFTED, LOOKUP = "off", "drafted", "lookup"


def check_contract(engine: DecodingEngine, uses: dict[str, DrafterUse], requests: Sequence[Request]) -> None:
    """Everything that the interface promises about answers. `uses` has the three variants, `requests` at least 4."""
    assert engine.start(uses) == {}
    used = engine.describe()
    assert used.version
    assert used.device
    assert used.restarts == 0

    # Every variant gives the same greedy answers, in the order of the requests, also several at a time.
    plain = engine.generate(OFF, requests, 1)
    assert [answer.id for answer in plain.answers] == [request.id for request in requests]
    for name, concurrency in ((OFF, 3), (DRAFTED, 1), (DRAFTED, 3), (LOOKUP, 2)):
        run = engine.generate(name, requests, concurrency)
        assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in plain.answers], name
    for run in (plain, engine.generate(DRAFTED, requests, 1)):
        assert run.cpu_seconds > 0
        # One request at a time: the run lasts at least as long as its answers together.
        assert sum(answer.seconds for answer in run.answers) <= run.seconds + 0.01
        for answer in run.answers:
            assert answer.whole
            assert 0 < answer.ttft_s <= answer.seconds

    # Rounds account for the tokens: one from the prefill, then one per round and one per accepted draft token.
    for answer in plain.answers:
        assert answer.rounds == len(answer.token_ids) - 1
    drafted = engine.generate(DRAFTED, requests, 2).answers
    assert sum(answer.rounds for answer in drafted) <= sum(answer.rounds for answer in plain.answers)
    for answer in drafted:
        depth = len(answer.accepted_histogram) - 1
        surplus = tokens_of(answer) - len(answer.token_ids)
        assert 0 <= surplus <= depth  # an engine may count tokens that the last round accepted behind the end

    # A truncated run ends with an empty slot: the answers still being decoded are cut off, their tokens are right.
    longer = [replace(request, max_new_tokens=request.max_new_tokens * (1 if index % 2 == 0 else 4))
              for index, request in enumerate(requests)]
    whole = {answer.id: answer for answer in engine.generate(OFF, longer, 2).answers}
    cut = engine.generate(OFF, longer, 2, truncate=True)
    assert any(not answer.whole for answer in cut.answers)
    for answer in cut.answers:
        expected = whole[answer.id].token_ids
        assert answer.token_ids == (expected if answer.whole else expected[: len(answer.token_ids)])

    # A stop id ends an answer and is its last token.
    first = plain.answers[0]
    stop = first.token_ids[1]
    (stopped,) = engine.generate(OFF, [replace(requests[0], stop_ids=(stop,))], 1).answers
    assert stopped.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]

    # Variants that are not named any more are released; the others answer as before.
    assert engine.start({OFF: uses[OFF]}) == {}
    assert engine.generate(OFF, requests[:1], 1).answers[0].token_ids == first.token_ids
    engine.stop()


def tokens_of(answer: Answer) -> int:
    """Tokens that an answer's rounds account for."""
    return 1 + sum((1 + accepted) * rounds for accepted, rounds in enumerate(answer.accepted_histogram))
