"""The standalone drafter: a plain Llama to everyone, the same function in training and serving, blind to neighbours."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.drafters.standalone import FAMILY, Distillation, StandaloneDrafter, StandaloneProposer
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.protocol import CommittedTokens
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import StepContext
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target
from tests.workers.drafters.allocations import largest

VOCAB = 320
TREE = DraftTreeShape(num_steps=3, top_k=3, num_draft_tokens=12)
# Same weights, sums in another order, float32; logits here are of order one.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tiny_target(tmp_path_factory.mktemp("target"), "llama", seed=5))


def ends_of(target: TargetModel) -> TargetEmbeddings:
    assert target.path is not None
    return read_target_embeddings(target.path, target.config.tie_word_embeddings)


def drafter_for(target: TargetModel, **spec: object) -> StandaloneDrafter:
    """Random weights, large enough that every part shows in the logits."""
    wanted = DrafterSpec.model_validate({"family": "standalone", "max_draft_tokens": 3} | spec)
    drafter = FAMILY.create(wanted, target.config, ends_of(target), (), DraftVocabulary(torch.arange(VOCAB), VOCAB), 1)
    assert isinstance(drafter, StandaloneDrafter)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return drafter


def documents(lengths: tuple[int, ...], hidden: int = 32) -> PackedBatch:
    """Documents whose second half is the answer."""
    generator = torch.Generator().manual_seed(7)
    return pack_rows([(torch.randint(VOCAB, (length,), generator=generator), torch.arange(length) >= length // 2,
                  torch.zeros(length, 0, hidden), torch.randn(length, hidden, generator=generator))
                 for length in lengths])


def logits_of(drafter: StandaloneDrafter, text: Tensor) -> Tensor:
    """[T, V] by the training face."""
    alone = PackedBatch(text, torch.ones_like(text, dtype=torch.bool), torch.zeros(len(text), 0, 1),
                            torch.zeros(len(text), 1), (len(text),))
    objective = Distillation(drafter, TargetEmbeddings(torch.zeros(VOCAB, 1), torch.zeros(VOCAB, 1), torch.zeros(1)),
                             TrainSpec(), len(text), torch.float32)
    positions = torch.arange(len(text))
    with torch.no_grad():
        states = drafter.states(alone, objective._rotary.at(positions), positions, torch.float32)
        return states @ drafter.lm_head.weight.T


def test_transformers_loads_the_export_as_a_llama_with_the_same_logits(target: TargetModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    drafter = drafter_for(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    assert isinstance(theirs, LlamaForCausalLM)
    text = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(drafter, text), theirs(text[None]).logits[0], rtol=0, atol=TOLERANCE)


def test_decoding_equals_training_along_every_path_of_a_tree(target: TargetModel, tmp_path: Path) -> None:
    drafter = drafter_for(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    proposer = open_drafter(tmp_path / "drafter", target)
    assert isinstance(proposer, StandaloneProposer)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(VOCAB, (length,), generator=generator) for length in (9, 14)]
    state = proposer.new_state(3)
    for row, text in zip((2, 0), texts, strict=True):
        proposer.admit(state, row, text[:4].tolist())
        proposer.extend(state, CommittedTokens([row], [0], [text[1:5].tolist()], torch.zeros(1, 4, 0, 32)))
    # The rest together, one row's padded; then trees of both rows at once, twice, so that scratch keys are old.
    rest = [text[5:].tolist() for text in texts]
    proposer.extend(state, CommittedTokens([2, 0], [4, 4], rest, torch.zeros(2, max(map(len, rest)), 0, 32)))
    proposer.propose(state, [0, 2], DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3))
    tree = proposer.propose(state, [2, 0], TREE)
    alone = proposer.propose(state, [0], TREE)
    assert torch.equal(alone.tokens[0], tree.tokens[1])
    for row, text in enumerate(texts):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        for node in range(1, len(tokens)):
            path, at = [], node
            while at:
                path.insert(0, tokens[at])
                at = parents[at]
            log_q = logits_of(drafter, torch.cat([text, torch.tensor(path)])).log_softmax(-1)
            expected = sum(float(log_q[len(text) - 1 + depth, token]) for depth, token in enumerate(path))
            assert float(tree.scores[row, node]) == pytest.approx(expected, abs=2e-4)


def test_reading_a_prompt_allocates_no_mask_of_its_length_squared(target: TargetModel, tmp_path: Path) -> None:
    FAMILY.save(tmp_path / "drafter", drafter_for(target), "float32", None)
    proposer, num_tokens = open_drafter(tmp_path / "drafter", target), 480
    state = proposer.new_state(1)
    text = torch.randint(VOCAB, (num_tokens + 1,), generator=torch.Generator().manual_seed(3)).tolist()
    proposer.admit(state, 0, text[:-1])
    pairs = CommittedTokens([0], [0], [text[1:]], torch.zeros(1, num_tokens, 0, 32))
    assert largest(lambda: proposer.extend(state, pairs)) < num_tokens**2 // 2


def test_documents_of_one_batch_do_not_see_each_other(target: TargetModel) -> None:
    drafter, packed = drafter_for(target), documents((12, 20, 8))
    objective = FAMILY.objective(drafter, ends_of(target), TrainSpec(ttt_length=3), 20, torch.float32)
    together = objective(packed).hits
    apart: list[Tensor] = [hit.new_zeros(0) for hit in together]
    starts = [0, 12, 32]
    for start, length in zip(starts, packed.lengths, strict=True):
        part = slice(start, start + length)
        hits = objective(PackedBatch(packed.token_ids[part], packed.loss_mask[part], packed.aux[part],
                                         packed.last[part], (length,))).hits
        apart = [torch.cat(pair) for pair in zip(apart, hits, strict=True)]
    assert [int(hit.sum()) for hit in together] == [int(hit.sum()) for hit in apart]
    assert [hit.numel() for hit in together] == [hit.numel() for hit in apart]


def test_the_loss_is_the_cross_entropy_with_the_target_at_each_answer_token_once(target: TargetModel) -> None:
    drafter, packed, ends = drafter_for(target).double(), documents((12, 20)), ends_of(target)
    double = TargetEmbeddings(ends.embed.double(), ends.lm_head.double(), ends.norm.double())
    outcome = FAMILY.objective(drafter, double, TrainSpec(ttt_length=3), 20, torch.float64)(
        packed, StepContext(0, 1, 0))
    outcome.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()
             if parameter.grad is not None}
    assert found.keys() == dict(drafter.named_parameters()).keys()
    drafter.zero_grad()
    losses, start = [], 0
    for length in packed.lengths:
        part = slice(start, start + length)
        alone = PackedBatch(packed.token_ids[part], packed.loss_mask[part], packed.aux[part], packed.last[part],
                                (length,))
        positions = torch.arange(length)
        objective = Distillation(drafter, double, TrainSpec(), length, torch.float64)
        states = drafter.states(alone, objective._rotary.at(positions), positions, torch.float64)
        log_q = (states @ drafter.lm_head.weight.T).log_softmax(-1)
        p = (alone.last.double() @ double.lm_head.T).softmax(-1)
        # The answer's first token is the target's own; from there on each next answer token is predicted.
        losses += [-(p[t] * log_q[t]).sum() for t in range(length // 2, length - 1)]
        start += length
    expected = torch.stack(losses).mean()
    expected.backward()
    assert outcome.supervised == len(losses)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=1e-6)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_it_is_initialised_from_the_principal_directions_of_the_targets_embeddings(target: TargetModel) -> None:
    def created(hidden: int) -> StandaloneDrafter:
        spec = DrafterSpec(family="standalone", hidden_size=hidden, max_draft_tokens=3)
        vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
        drafter = FAMILY.create(spec, target.config, ends_of(target), (), vocabulary, 1)
        assert isinstance(drafter, StandaloneDrafter)
        return drafter

    ends = ends_of(target)
    for wanted, name in ((ends.embed, "model.embed_tokens.weight"), (ends.lm_head * ends.norm, "lm_head.weight")):
        whole, half = (dict(created(hidden).named_parameters())[name].detach() for hidden in (32, 16))
        # As wide as the target nothing is lost: every product of two rows is the target's.
        torch.testing.assert_close(whole @ whole.T, wanted @ wanted.T, rtol=0, atol=1e-4)
        lost = torch.linalg.matrix_norm(wanted @ wanted.T - half @ half.T)
        least = torch.linalg.svdvals(wanted)[16:].pow(4).sum().sqrt()  # no sixteen directions lose less
        torch.testing.assert_close(lost, least, rtol=1e-3, atol=1e-4)


def test_width_and_depth_are_its_own_and_the_heads_have_the_targets_size(target: TargetModel) -> None:
    config = drafter_for(target).config
    assert (config.hidden_size, config.num_layers, config.head_dim, config.num_heads) == (16, 2, 8, 2)
    assert config.intermediate_size == 32
    config = drafter_for(target, hidden_size=24, num_layers=1, num_attention_heads=4, intermediate_size=40).config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (24, 1, 4, 2)
    with pytest.raises(InvalidInput, match="sliding_window"):
        drafter_for(target, sliding_window=16)


def test_an_incomplete_directory_or_one_for_another_target_is_refused(target: TargetModel, tmp_path: Path) -> None:
    FAMILY.save(tmp_path / "drafter", drafter_for(target), "float32", None)
    weights = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(weights)
    other = load_target(tiny_target(tmp_path / "other", vocab_size=300))
    with pytest.raises(CheckpointInvalid, match="vocabulary of 320"):
        open_drafter(tmp_path / "drafter", other)
    save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, weights)
    with pytest.raises(CheckpointInvalid, match="weight is missing"):
        open_drafter(tmp_path / "drafter", target)
