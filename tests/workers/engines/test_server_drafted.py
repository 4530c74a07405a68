"""A server with a drafter: the same answers, and an account of what speculation did."""

from pathlib import Path

import httpx
import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_workers.engines.process import EngineCommand, EngineFailed, start_engine
from tests.workers.engines.conftest import chat_body
from tests.workers.engines.test_server import CHAT, events, metric


def test_a_drafted_server_answers_like_the_undrafted_one_and_tells_its_rounds(
        http: httpx.Client, target: Path, drafter: Path, tmp_path: Path) -> None:
    tree = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
    use = DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=tree))
    drafted = start_engine(EngineCommand(target=target, model="tiny", use=use, max_concurrency=2, threads=1), tmp_path)
    try:
        with httpx.Client(base_url=drafted.wait_ready(120), timeout=120) as client:
            assert client.get("/v1/models").json()["data"][0]["speculation"] == tree.model_dump()
            for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
                body = chat_body(max_tokens=64, return_spec_tokens_details=True, return_token_ids=True, **fields)
                plain = http.post(CHAT, json=body).json()
                fast = client.post(CHAT, json=body).json()
                assert fast["choices"] == plain["choices"]
                assert fast["usage"] == plain["usage"]
                details = fast["sglext"]["spec_tokens_details"]
                histogram = details["spec_correct_drafts_histogram"]
                assert sum(histogram) == details["spec_verify_ct"]
                assert details["spec_num_correct_drafts"] == sum(k * n for k, n in enumerate(histogram))
                # The first token comes from the prefill, every other from a round.
                assert details["spec_verify_ct"] + details["spec_num_correct_drafts"] == 63
                assert details["spec_num_proposed_drafts"] == 5 * details["spec_verify_ct"]
            assert metric(client, "eyrie_drafted_rounds_total") == metric(client, "eyrie_verify_rounds_total") > 0
            # Both answers' first tokens came from no round.
            assert metric(client, "eyrie_drafted_round_tokens_total") == metric(
                client, "eyrie_generated_tokens_total") - 2
            assert metric(client, "eyrie_acceptance_length") >= 1.0

            scored = chat_body(max_tokens=64, logprobs=True, top_logprobs=4)
            plain, fast = (one.post(CHAT, json=scored).json()["choices"][0] for one in (http, client))
            assert fast["message"] == plain["message"]
            entries = [entry for chunk in events(client, CHAT, scored) if chunk["choices"][0]["logprobs"]
                       for entry in chunk["choices"][0]["logprobs"]["content"]]
            for found in (fast["logprobs"]["content"], entries):
                assert len(found) == 64
                for one, other in zip(found, plain["logprobs"]["content"], strict=True):
                    assert [top["bytes"] for top in one["top_logprobs"]] == [
                        top["bytes"] for top in other["top_logprobs"]]
                    assert [one["logprob"], *(top["logprob"] for top in one["top_logprobs"])] == pytest.approx(
                        [other["logprob"], *(top["logprob"] for top in other["top_logprobs"])], abs=1e-4)

            body = chat_body(max_tokens=64, stream_options={"include_usage": True}, return_token_ids=True)
            answer = events(client, CHAT, body)
            ids = [token for chunk in answer for choice in chunk["choices"] for token in choice.get("token_ids", [])]
            for drafts in (True, False):
                traced = events(client, CHAT, body | {"eyrie": {"drafter": drafts, "rounds": True}})
                rounds = [one for chunk in traced for choice in chunk["choices"]
                          for one in choice.get("eyrie", {}).get("rounds", [])]
                assert [token["token_id"] for one in rounds for token in one["tokens"]] == ids
                assert {len(one["nodes"]) for one in rounds[1:]} == ({6} if drafts else {1})
                for one in rounds:
                    accepted = [node["token"] for node in one["nodes"] if node["accepted"]]
                    assert accepted == [token["token"] for token in one["tokens"] if token["drafted"]]
                text = "".join(choice["delta"].get("content") or "" for chunk in traced for choice in chunk["choices"])
                assert text == "".join(choice["delta"].get("content") or ""
                                       for chunk in answer for choice in chunk["choices"])
            assert not any("eyrie" in choice for chunk in answer for choice in chunk["choices"])
    finally:
        drafted.stop()


def test_a_drafter_that_is_not_there_is_reported_by_name(target: Path, tmp_path: Path) -> None:
    tree = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)
    use = DrafterUse(drafter_dir=str(tmp_path / "nowhere"), setting=Setting(tree=tree))
    started = start_engine(EngineCommand(target=target, model="tiny", use=use), tmp_path)
    with pytest.raises(EngineFailed, match="nowhere"):
        started.wait_ready(120)
