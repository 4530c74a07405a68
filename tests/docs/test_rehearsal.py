"""The rehearsal's job is the seed's own file, smaller; its conversations are read as the corpus wrote them."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.quickstart.corpus.streams import conversations
from eyrie_api.contract.job import JobSpec
from eyrie_api.conversation import Message, conversation
from tests.cluster.seed_job import SEED, STREAM, published, seed_job


@pytest.mark.parametrize("short", [False, True])
def test_the_rehearsal_keeps_what_the_seeds_file_is_about(short: bool) -> None:
    document, replaced = seed_job(Path("/targets/olmo"), short=short)
    ours, seed = (JobSpec.model_validate_json(json.dumps(one)) for one in (document, yaml.safe_load(SEED.read_text())))
    assert ours.data.source_names == seed.data.source_names
    assert [source.weight for source in ours.data.sources] == [source.weight for source in seed.data.sources]
    assert ours.data.sources[2] == seed.data.sources[2], "the bucket's source is the file's own"
    assert [source.chat_template_kwargs for source in ours.data.sources] \
        == [source.chat_template_kwargs for source in seed.data.sources]
    assert (ours.engine, ours.regenerate.sampling, ours.capture.codec, ours.drafter) \
        == (seed.engine, seed.regenerate.sampling, seed.capture.codec, seed.drafter)
    mixes, *others = ours.sweep.axes
    assert (mixes.field, len(mixes.values)) == (seed.sweep.axes[0].field, 2)
    assert set(map(str, mixes.values)) <= set(map(str, seed.sweep.axes[0].values))
    assert [(axis.field, len(axis.values)) for axis in others] \
        == ([] if short else [("drafter.intermediate_size", 4)])
    assert [suite.path for suite in ours.benchmark.suites] == ["held-out"], "the others are on the Hub"
    assert (ours.prove.hardware is None, seed.prove.profile_names) == (True, ("h200-x2", "b200"))
    assert ours.serve.endpoint == seed.serve.endpoint
    assert ours.promotion.require_identical
    assert any(line.startswith("data.max_conversations: 500000 -> ") for line in replaced)


def test_a_row_written_as_dolci_publishes_it_asks_what_the_corpus_asks() -> None:
    rows = list(islice(conversations(60, STREAM), 60))
    assert any("tools" in row for row in rows)
    for row in rows:
        ours = conversation(row, "", 1, "messages")
        dolci = conversation(json.loads(json.dumps(published(row))), "", 1, "messages")
        assert dolci.tools == ours.tools
        wanted = [message for message in ours.prompt if message["role"] != "tool"]
        found = [message for message in dolci.prompt
                 if message["role"] != "tool" and message != {"role": "system", "content": ""}]
        assert [message.get("content") for message in found] == [message.get("content") for message in wanted]
        assert arguments(found) == arguments(wanted)
        assert [message["content"] for message in dolci.prompt if message["role"] == "tool"] \
            == [message["content"] for message in ours.prompt if message["role"] == "tool"]


def arguments(messages: list[Message]) -> list[Any]:
    """Of all calls, in order."""
    return [json.loads(call["function"]["arguments"]) for message in messages for call in message.get("tool_calls", ())]
