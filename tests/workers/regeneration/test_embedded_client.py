"""The order in which the embedded engine is given its prompts."""

from pathlib import Path

from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_workers.regeneration.answers import GeneratedAnswer, GenerationRequest
from eyrie_workers.regeneration.local_engines import EmbeddedClient
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target

LENGTHS = [5, 90, 17, 60, 3, 41, 77, 29, 88, 12, 54, 36]


def test_prompts_of_similar_lengths_are_answered_together_and_all_are_answered(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target")
    engine = Engine(load_target(path), max_concurrency=2)
    spec = RegenerateSpec(concurrency=2, max_new_tokens=4, sampling=SamplingSpec(temperature=0.0))
    prompts = [GenerationRequest(str(length), [], [], list(range(10, 10 + length)), 0, place)
               for place, length in enumerate(LENGTHS)]
    together: list[int] = []

    def seen() -> None:
        lengths = [len(row.request.prompt_ids) for row in engine._rows]
        together.append(max(lengths, default=0) - min(lengths, default=0))

    answers = [*EmbeddedClient(engine, ChatTokenizer(path), spec, 128).answers(iter(prompts), seen)]
    assert all(isinstance(answer, GeneratedAnswer) for answer in answers)
    assert sorted(int(answer.row_id) for answer in answers) == sorted(LENGTHS)
    assert max(together) <= 20
