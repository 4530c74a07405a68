"""The targets that are not shipped: their text, a training at reduced size, and how a job resolves them."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quickstart import card as write_card
from benchmarks.quickstart import entropy, library, pretrain
from benchmarks.quickstart.corpus.streams import is_held_out, training_stream, user_prompts
from benchmarks.quickstart.llama import Llama
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.templates import ChatTokenizer

SHELF = library.Shelf(Path(json.__file__).parent.parent / "email")  # reading the whole library takes seconds


def test_library_conversations_are_a_function_of_the_seed_and_hold_no_held_out_prompt() -> None:
    first = [c.row() for c in islice(library.library_stream(3, SHELF), 60)]
    assert first == [c.row() for c in islice(library.library_stream(3, SHELF), 60)]
    assert first != [c.row() for c in islice(library.library_stream(4, SHELF), 60)]
    assert not any(is_held_out(prompt) for row in first for prompt in user_prompts(row["messages"]))
    assert all(is_held_out(user_prompts(c.chat.messages)[-1]) for c in islice(library.library_held_out(3, SHELF), 3))
    assert all(m["content"] and m["content"].isascii() for row in first for m in row["messages"])


def test_every_kind_of_library_conversation_has_a_question_and_an_answer_of_bounded_length() -> None:
    for maker, _ in library.FAMILIES:
        for number in range(20):
            question, answer = (m["content"] for m in maker(Random(number), SHELF).messages)
            assert 0 < len(answer) <= library.LONGEST + 20
            assert len(question) <= 2 * library.LONGEST + 200


MODULE = """'''A module whose docstring has the required length.'''
class Box:
    @staticmethod
    def weigh(things,
              limit=3):
        '''Weigh things, one after the other, up to a limit.'''
        total = sum(things)
        if total > limit:
            raise ValueError(total)
        return total
"""


def test_code_is_the_definition_without_its_docstring(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(MODULE)
    shelf = library.Shelf(tmp_path)
    (item,) = shelf.short_items
    assert (item.module, item.name, item.doc) == ("box", "weigh", "Weigh things, one after the other, up to a limit.")
    assert item.head == "def weigh(things,\n          limit=3):"
    assert item.body.splitlines()[0] == "    total = sum(things)"
    assert item.body.endswith("    return total")
    assert shelf.documented_modules == (("box", "A module whose docstring has the required length."),)


def test_text_is_cut_at_whole_lines() -> None:
    assert library.beginning("one\ntwo\nthree", 8) == "one\ntwo"
    assert library.beginning("a long first line", 6) == "a long"


def course(name: str, **shape: object) -> pretrain.Course:
    """A course that takes seconds: the real text, a minimal model."""
    real = pretrain.COURSES[name]
    small = replace(real.shape, vocab_size=512, hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1,
                    num_layers=4, **shape)  # type: ignore[arg-type]
    return replace(real, shape=small, recipe=replace(real.recipe, tokens=6 * 2048, warmup_steps=1))


def test_a_course_trains_and_resumes_from_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "targets" / pretrain.QUICKSTART_LARGE
    (tmp_path / "work").mkdir()
    made = replace(course(pretrain.QUICKSTART_LARGE), stream=training_stream)  # reading the whole library takes seconds
    pretrain.run(made, out, tmp_path / "work", num_validation=4, num_tokenizer=40)
    assert "step 6/6" in capsys.readouterr().out
    assert load_target(out).config.num_layers == 4
    weights = (out / "model.safetensors").read_bytes()
    pretrain.run(made, out, tmp_path / "work", num_validation=4)
    assert (out / "model.safetensors").read_bytes() == weights
    card = json.loads((out / "card.json").read_text())
    assert card["finished"] is True
    assert card["validation"]["scores"]["all"]["entropy"] > 0
    # a machine so slow that it saves before it logs
    assert write_card.readme({**card, "curve": [], "finished": False}).startswith("# Eyrie quickstart large target")


@pytest.mark.parametrize(("name", "kind"), [(pretrain.QUICKSTART_HYBRID, "qwen2"), (pretrain.QUICKSTART_OLMO, "olmo3")])
def test_targets_with_windows_are_known_to_transformers_and_to_us(name: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = course(name, sliding_window=5).shape
    own = Llama(shape)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    pretrain.export(own, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32).eval()
    assert theirs.config.layer_types == list(shape.layer_types)
    assert shape.layer_types.count("sliding_attention") == 3
    tokens = torch.randint(0, shape.vocab_size, (1, 40))
    ours = load_target(tmp_path)
    with torch.no_grad():
        wanted = own(tokens, torch.ones_like(tokens))[0]
        _, last = ours.hidden_states([tokens[0]], (1,))[0]
        assert (theirs(tokens).logits[0] - wanted).abs().max() < 1e-4
        assert (ours.logits(last) - wanted).abs().max() < 1e-4
        own.shape = replace(shape, sliding_window=None)
        assert (own(tokens, torch.ones_like(tokens))[0] - wanted).abs().max() > 1e-3


def test_a_target_is_more_confident_in_greedy_answers_than_in_random_ones() -> None:
    path = resolve(TargetSpec(model="quickstart"))
    target, tokenizer = load_target(path), ChatTokenizer(path)
    rows = list(entropy.questions(3, library=False))
    assert all(is_held_out(user_prompts(row["messages"])[-1]) for row in rows)
    said = entropy.answers(target, tokenizer, rows, 0.0, 12)
    found = entropy.confidence(target, said)
    assert found.tokens == sum(len(answer) for _, answer in said)
    chance = [(prompt, torch.randint(5, 2048, (12,), generator=torch.Generator().manual_seed(0)).tolist())
              for prompt, _ in said]
    other = entropy.confidence(target, chance)
    assert found.entropy < other.entropy
    assert found.top1 > other.top1
