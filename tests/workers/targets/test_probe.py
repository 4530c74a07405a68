"""The probe ranks the layer that carries what is to be foreseen above those that do not."""

from pathlib import Path

import pytest
import torch

from eyrie_api.errors import NoUsableData
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.layer_probe import probe_layers
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target
from tests.workers.stages.test_capture import write_rows, write_spec


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tiny_target(tmp_path_factory.mktemp("target"), num_layers=5), "float32")


def rows(num: int, length: int = 40) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(60, (length,), generator=generator), 4) for _ in range(num)]


def test_every_layer_but_the_last_is_ranked_and_three_are_found_together(target: TargetModel) -> None:
    found = probe_layers(target, rows(24), (1, 2, 3))
    assert sorted(score.layers for score in found.alone) == [(0,), (1,), (2,), (3,), (4,)]
    assert [score.agreement for score in found.alone] == sorted((s.agreement for s in found.alone), reverse=True)
    assert [len(score.layers) for score in found.together] == [1, 2, 3]
    assert found.together[0] == found.alone[0]
    assert found.chosen.layers == (1, 2, 3)
    assert found.positions == 6 * 36  # every fourth row, from the last prompt token on, while a token follows
    assert all(str(layer) in found.summary() for layer in found.together[-1].layers)


def test_a_layer_that_says_what_is_asked_is_found(target: TargetModel) -> None:
    class Telling(TargetModel):
        """Layer 2 of position i holds the final state of position i + 1."""

        def hidden_states(self, token_ids_list, aux_layers):  # type: ignore[no-untyped-def]
            result = []
            for aux, last in super().hidden_states(token_ids_list, aux_layers):
                aux = aux.clone()
                if 2 in aux_layers:
                    aux[:-1, list(aux_layers).index(2)] = last[1:]
                result.append((aux, last))
            return result

    telling = Telling.__new__(Telling)
    telling.__dict__.update(target.__dict__)
    found = probe_layers(telling, rows(40), (1, 3))
    assert found.alone[0].layers == (2,)
    assert found.alone[0].agreement > found.alone[1].agreement + 0.2
    assert found.chosen.agreement < found.alone[0].agreement


def test_too_few_rows_are_refused(target: TargetModel) -> None:
    with pytest.raises(NoUsableData, match="too few"):
        probe_layers(target, rows(1), (1, 2))


def test_capture_reports_the_ranking_next_to_its_choice(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target")
    write_rows(tmp_path / "rows", path, 12)
    spec = write_spec(tmp_path / "out", path, tmp_path / "rows", probe_layers=True)
    capture(spec, Stage(tmp_path / "out", quiet=True))
    events = (tmp_path / "out" / "events.jsonl").read_text()
    assert events.count("LayersProbed") == 1
    assert events.index("LayersChosen") < events.index("LayersProbed")
