from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.errors import Conflict, InvalidInput, UnsupportedTarget
from eyrie_workers.speculation.engine import Engine, Generation, Request, StepOutput
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target
from tests.workers.independent_rows import INDEPENDENT_ROWS
from tests.workers.speculation.chi_square import chi_square_score
from tests.workers.speculation.drafters import OracleDrafter, RandomDrafter, TextState

CHAIN = DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5)
TREE = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=14)
SAMPLINGS = [SamplingSpec(temperature=0.0), SamplingSpec(temperature=1.0),
             SamplingSpec(temperature=0.8, top_p=0.9, top_k=40)]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen2 sliding": {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}}
EOS = 2


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TargetModel]:
    root = tmp_path_factory.mktemp("targets")
    # A small initializer range keeps the random targets from repeating one token for ever.
    return {name: load_target(tiny_target(root / name.replace(" ", "-"), name.split()[0], seed=5,
                                          initializer_range=0.15, **extra)) for name, extra in VARIANTS.items()}


def requests(num_tokens: int = 24, sampling: SamplingSpec = SAMPLINGS[0]) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [Request(f"r{i}", torch.randint(3, 320, (length,), generator=generator).tolist(), num_tokens, sampling,
                    seed=100 + i) for i, length in enumerate((5, 23, 1, 60, 12))]


def texts(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize(("variant", "sampling"), [
    *((variant, SAMPLINGS[0]) for variant in VARIANTS), ("qwen3", SAMPLINGS[1]), ("llama", SAMPLINGS[2])])
def test_no_drafter_shape_or_batch_changes_a_token(variant: str, sampling: SamplingSpec,
                                                   targets: dict[str, TargetModel]) -> None:
    target = targets[variant]
    asked = requests(num_tokens=14, sampling=sampling)
    plain = Engine(target).generate(asked)
    assert len({tuple(text) for text in texts(plain)}) > 1
    assert texts(Engine(target, max_concurrency=3).generate(asked)) == texts(plain)
    accepted = 0
    random, oracle = RandomDrafter(320), OracleDrafter(320, target=target)
    for drafter, shape, concurrency in ((random, CHAIN, 1), (random, TREE, 3), (oracle, CHAIN, 3), (oracle, TREE, 1),
                                        (oracle, TREE, 2)):
        drafted = Engine(target, drafter, max_concurrency=concurrency).generate(asked, shape)
        assert texts(drafted) == texts(plain), (type(drafter).__name__, shape.label(), concurrency)
        accepted += sum(len(generation.accepted_histogram) > 2 for generation in drafted)
    assert accepted > 0  # paths of two and more were taken: the test has looked at compaction


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_rows_with_and_without_drafter_or_trace_are_decoded_together_to_the_same_tokens(
        sampling: SamplingSpec, targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    asked = requests(num_tokens=14, sampling=sampling)
    plain = texts(Engine(target).generate(asked))
    oracle = OracleDrafter(320, target=target)
    for flags in ([(True, True)] * 5, [(False, True)] * 5,
                  [(True, True), (False, True), (True, False), (False, False), (True, True)]):
        mixed = [replace(one, draft=draft, trace=trace) for one, (draft, trace) in zip(asked, flags, strict=True)]
        engine = Engine(target, oracle, max_concurrency=3, tree=TREE)
        for one in mixed:
            engine.submit(one)
        outputs: dict[str, list[StepOutput]] = {one.id: [] for one in mixed}
        while engine.num_waiting or engine.num_running:
            for output in engine.step():
                outputs[output.id].append(output)
        for one, text in zip(mixed, plain, strict=True):
            steps = outputs[one.id]
            assert [token for step in steps for token in step.token_ids] == text
            assert one.draft or not any(step.drafted != [0] for step in steps[1:])
            rounds = [traced for step in steps for traced in step.rounds]
            if not one.trace:
                assert rounds == []
                continue
            assert [token for traced in rounds for token in traced.emitted] == text
            assert rounds[0].tokens == []
            before = rounds[0].emitted[-1]
            for traced in rounds[1:]:
                assert traced.tokens[0] == before
                assert all(0 <= parent < node for node, parent in enumerate(traced.parents) if node)
                path = [0, *traced.accepted]
                assert [traced.parents[node] for node in path[1:]] == path[:-1]
                assert [traced.tokens[node] for node in traced.accepted] == traced.emitted[:len(traced.accepted)]
                assert min(traced.tokens) >= 0, "padding is no proposal"
                assert one.draft or len(traced.tokens) == 1
                before = traced.emitted[-1]
        drafted = [traced for one in mixed if one.draft for step in outputs[one.id] for traced in step.rounds]
        assert not drafted or any(len(traced.accepted) > 1 for traced in drafted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_output_equals_hugging_face_generate(family: str, targets: dict[str, TargetModel]) -> None:
    from transformers import AutoModelForCausalLM

    target = targets[family]
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    asked = requests(num_tokens=32)
    ours = texts(Engine(target, OracleDrafter(320, target=target), max_concurrency=2).generate(asked, TREE))
    for request, text in zip(asked, ours, strict=True):
        prompt = torch.tensor([list(request.prompt_ids)])
        with torch.no_grad():
            theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32,
                                    min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert text == theirs[0, prompt.shape[1]:].tolist()


@INDEPENDENT_ROWS
def test_verification_reproduces_plain_decoding_bit_for_bit(targets: dict[str, TargetModel]) -> None:
    """The claim of `cache` and `Linear`, counted: the states the drafter is given are those of plain decoding."""
    target = targets["qwen3"]
    aux_layers = tuple(range(target.config.num_layers + 1))

    class Keeping(OracleDrafter):
        state: TextState

        def new_state(self, num_rows: int) -> TextState:
            self.state = super().new_state(num_rows)
            return self.state

    kept = []
    for spoil, shape in ((1, CHAIN), (4, CHAIN), (3, TREE)):
        drafter = Keeping(320, aux_layers=aux_layers, target=target, spoil_every=spoil)
        Engine(target, drafter).generate([requests(num_tokens=64)[1]], shape)
        kept.append(torch.stack(drafter.state.aux[0]))
    num_settled = min(len(states) for states in kept)
    assert num_settled > 60
    plain, chain, tree = (states[23:num_settled] for states in kept)  # behind the prompt, which is read the same way
    # One value in about 10^8 may round the other way; here are some 10^4.
    assert torch.equal(plain, chain)
    assert torch.equal(plain, tree)


def test_the_drafter_is_given_the_targets_own_states(targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    drafter = OracleDrafter(320, aux_layers=(0, 2, 4), target=target)
    engine = Engine(target, drafter, max_concurrency=2)
    engine.tree = TREE
    for request in requests(num_tokens=30):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    state: Any = engine._state()
    for row in engine._rows:
        text, aux = state.texts[row.drafter_row], torch.stack(state.aux[row.drafter_row])
        assert text == row.tokens
        [(expected, _)] = target.hidden_states([torch.tensor(text[:-1])], (0, 2, 4))
        torch.testing.assert_close(aux, expected, rtol=1e-4, atol=1e-4)  # cached and uncached float32 sums


def test_rows_join_and_leave_while_others_decode(targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    asked = requests(num_tokens=20, sampling=SAMPLINGS[1])
    alone = {generation.id: generation.token_ids for generation in Engine(target).generate(asked)}
    engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=3, tree=CHAIN)
    heard: dict[str, list[int]] = {request.id: [] for request in asked}
    finished: dict[str, Generation] = {}
    arrivals = list(asked)
    for number in range(200):
        if arrivals and number % 2 == 0:
            engine.submit(arrivals.pop(0))
        for progress in engine.step():
            heard[progress.id] += progress.token_ids
            assert sum(progress.accepted) + len(progress.accepted) in (0, len(progress.token_ids))
            if progress.generation is not None:
                finished[progress.id] = progress.generation
    assert heard == alone
    assert {name: generation.token_ids for name, generation in finished.items()} == alone
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.step() == []


def test_cancelling_frees_a_slot_and_leaves_the_others_alone(targets: dict[str, TargetModel]) -> None:
    target = targets["qwen3"]
    asked = requests(num_tokens=24)
    alone = {generation.id: generation.token_ids for generation in Engine(target).generate(asked)}
    engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=3, tree=TREE)
    for request in asked:
        engine.submit(request)
    heard: dict[str, list[int]] = {request.id: [] for request in asked}
    for number in range(60):
        if number == 2:
            engine.cancel("r0")  # decoding, in the first slot
            engine.cancel("r4")  # waiting
            engine.cancel("nobody")
        for progress in engine.step():
            heard[progress.id] += progress.token_ids
    assert 0 < len(heard["r0"]) < 24
    assert heard["r4"] == []
    assert all(heard[name] == alone[name] for name in ("r1", "r2", "r3"))


def test_a_stop_id_ends_the_answer_and_belongs_to_it(targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    [request] = requests(num_tokens=40, sampling=SAMPLINGS[1])[:1]
    [whole] = Engine(target).generate([request])
    stop = whole.token_ids[17]
    cut = whole.token_ids[:whole.token_ids.index(stop) + 1]
    stopping = Request("s", request.prompt_ids, 40, request.sampling, request.seed, stop_ids=(stop,))
    for shape in (None, CHAIN, TREE):
        [generation] = Engine(target, OracleDrafter(320, target=target)).generate([stopping], shape)
        assert generation.token_ids == cut
        assert generation.finish_reason == "stop"
        emitted = 1 + sum((k + 1) * n for k, n in enumerate(generation.accepted_histogram))
        assert (emitted, sum(generation.accepted_histogram)) == (len(cut), generation.rounds)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7])
def test_the_answer_has_no_more_tokens_than_asked(num_tokens: int, targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    for shape in (None, CHAIN, TREE):
        [generation] = Engine(target, OracleDrafter(320, target=target)).generate(requests(num_tokens)[:1], shape)
        assert (len(generation.token_ids), generation.finish_reason) == (num_tokens, "length")
        assert 0 < generation.first_token_s <= generation.total_s


@pytest.mark.parametrize("shape", [None, CHAIN, TREE])
def test_a_text_that_fills_the_context_ends(shape: DraftTreeShape | None, targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    engine = Engine(target, OracleDrafter(320, target=target), max_length=64)
    [request] = requests(num_tokens=500)[3:4]
    [generation] = engine.generate([request], shape)
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 4)


def test_a_text_grows_the_cache_to_the_targets_whole_context(targets: dict[str, TargetModel]) -> None:
    longest = targets["llama"].config.max_position_embeddings
    prompt = requests()[3].prompt_ids
    [whole] = Engine(targets["llama"]).generate([Request("x", [*prompt] * 5, 10_000)])
    assert len(whole.token_ids) == longest - 5 * len(prompt)


def test_a_row_beyond_the_drafters_context_goes_on_without_it(targets: dict[str, TargetModel]) -> None:
    target = targets["qwen2"]
    asked = requests(num_tokens=36)  # the prompt of 5 tokens crosses 40 as well
    plain = Engine(target).generate(asked)
    for shape in (CHAIN, TREE):
        drafter = OracleDrafter(320, target=target, max_length=40)
        drafted = Engine(target, drafter, max_concurrency=3).generate(asked, shape)
        assert texts(drafted) == texts(plain)
        assert drafted[0].tau > 1.0
        assert drafted[3].tau == 1.0  # its prompt alone is longer


def test_bfloat16_and_inexact_engines_decode_too(targets: dict[str, TargetModel]) -> None:
    path = targets["llama"].path
    assert path is not None
    for target, exact in ((load_target(path, "bfloat16"), None), (targets["llama"], False)):
        engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=2, exact=exact)
        assert not engine.exact
        drafted = engine.generate(requests(num_tokens=16), TREE)
        assert all(len(generation.token_ids) == 16 for generation in drafted)
        assert max(generation.tau for generation in drafted) > 1.5


def test_what_cannot_be_decoded_is_refused(targets: dict[str, TargetModel]) -> None:
    engine = Engine(targets["llama"], max_length=32)
    for bad, named in (([], "empty"), ([999], "vocabulary"), ([3] * 32, "context of 32")):
        with pytest.raises(InvalidInput, match=named):
            engine.submit(Request("x", bad, 4))
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        engine.submit(Request("x", [3], 0))
    with pytest.raises(InvalidInput, match="no drafter"):
        engine.generate([Request("x", [3], 4)], CHAIN)
    engine.submit(Request("x", [3], 9))
    with pytest.raises(Conflict, match="already queued or running"):
        engine.submit(Request("x", [3], 4))
    engine.step()
    drafting = Engine(targets["llama"], RandomDrafter(320), tree=CHAIN)
    drafting.submit(Request("x", [3], 9))
    drafting.step()
    with pytest.raises(Conflict, match="another draft tree"):
        drafting.tree = TREE


def test_answers_from_independent_seeds_follow_the_targets_distribution(targets: dict[str, TargetModel]) -> None:
    """End to end: 1500 sampled answers of three tokens, drafted, against exact joint probabilities."""
    target = targets["llama"]
    prompt = [11, 12, 13]
    sampling = SamplingSpec(temperature=0.25, top_k=4)

    def top4(text: list[int]) -> tuple[list[int], list[float]]:
        [(_, last)] = target.hidden_states([torch.tensor(text)], ())
        best = target.logits(last[-1:])[0].double().topk(4)
        return best.indices.tolist(), (best.values / 0.25).softmax(-1).tolist()

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {(*text, token): p * q for text, p in expected.items()
                    for token, q in zip(*top4([*prompt, *text]), strict=True)}
    num = 1500
    engine = Engine(target, RandomDrafter(320), max_concurrency=100)
    shape = DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
    asked = [Request(str(seed), prompt, 3, sampling, seed=seed) for seed in range(num)]
    answers = [tuple(text) for text in texts(engine.generate(asked, shape))]
    assert set(answers) <= set(expected)
    counts = [answers.count(text) for text in expected]
    assert chi_square_score(counts, [num * p for p in expected.values()]) < 4.0
    # The same counts against a target whose temperature is off by a fifth: the test sees it.
    warmer = {text: p**0.83 for text, p in expected.items()}
    whole = sum(warmer.values())
    assert chi_square_score(counts, [num * p / whole for p in warmer.values()]) > 4.0


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_following_the_load_changes_no_token_and_keeps_the_drafter_fed(sampling: SamplingSpec,
                                                                       targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    lengths = (24, 9, 14, 30, 5)
    asked = [replace(request, max_new_tokens=length)
             for request, length in zip(requests(sampling=sampling), lengths, strict=True)]
    plain = texts(Engine(target).generate(asked))
    drafter = OracleDrafter(320, target=target)  # checks that it is fed every settled pair, drafting or not
    engine = Engine(target, drafter, max_concurrency=3)
    seen: list[int] = []

    def by_load(num_rows: int) -> DraftTreeShape | None:
        seen.append(num_rows)
        return None if num_rows == 3 else TREE if num_rows == 2 else CHAIN

    engine.set_tree_schedule(by_load, [TREE, CHAIN])
    for request in asked:
        engine.submit(request)
    done: dict[str, Generation] = {}
    result: set[tuple[int, bool]] = set()
    while len(done) < len(asked):
        for progress in engine.step():
            result |= {(asked_for, count > 0)
                     for asked_for, count in zip(progress.drafted, progress.accepted, strict=True)}
            done |= {} if progress.generation is None else {progress.id: progress.generation}
    assert {asked_for for asked_for, _ in result} == {0, TREE.num_draft_tokens - 1, CHAIN.num_draft_tokens - 1}
    assert (0, True) not in result
    assert [done[request.id].token_ids for request in asked] == plain
    assert set(seen) == {1, 2, 3}
    accepted = [generation.accepted_histogram for generation in done.values()]
    assert any(len(histogram) > 2 for histogram in accepted)


def test_a_shape_may_not_change_under_way(targets: dict[str, TargetModel]) -> None:
    engine = Engine(targets["llama"], RandomDrafter(320), tree=CHAIN)
    engine.submit(requests()[0])
    engine.step()
    engine.tree = CHAIN
    with pytest.raises(Conflict):
        engine.tree = None
    with pytest.raises(Conflict):
        engine.set_tree_schedule(lambda _num_rows: CHAIN, [CHAIN])


def test_cancelling_in_a_cache_that_has_grown_leaves_the_others_their_answers(targets: dict[str, TargetModel]) -> None:
    target = targets["llama"]
    long = [Request(f"r{i}", [5 + i] * 250, 20) for i in range(3)]  # 256 places are what a cache begins with
    plain = texts(Engine(target).generate(long))
    engine = Engine(target, OracleDrafter(320, target=target), max_concurrency=3, tree=CHAIN)
    for request in long:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.cancel("r0")
    done: dict[str, Generation] = {}
    while len(done) < 2:
        done |= {progress.id: progress.generation for progress in engine.step() if progress.generation is not None}
    assert [done["r1"].token_ids, done["r2"].token_ids] == plain[1:]


def test_logits_that_are_not_finite_end_their_request_with_a_diagnosis_and_no_other(
        targets: dict[str, TargetModel], tmp_path: Path) -> None:
    given = requests()
    alone = texts(Engine(targets["llama"]).generate(given))
    # A damaged row of the embedding: the request whose answer reaches that token fails there.
    others = {token for request, answer in zip(given[1:], alone[1:], strict=True)
              for token in [*request.prompt_ids, *answer]} | set(given[0].prompt_ids)
    at = next(index for index, token in enumerate(alone[0]) if token not in others and index > 0)
    damaged = load_target(tiny_target(tmp_path / "t", "llama", seed=5, initializer_range=0.15))
    damaged.embed_weight = damaged.embed_weight.clone()
    damaged.embed_weight[alone[0][at]] = torch.nan
    engine = Engine(damaged, max_concurrency=3)
    for request in given:
        engine.submit(request)
    heard: dict[str, list[int]] = {request.id: [] for request in given}
    errors = []
    while engine.num_running or engine.num_waiting:
        for output in engine.advance():
            heard[output.id] += output.token_ids
            errors += [output.error] if output.error is not None else []
    assert [heard[request.id] for request in given] == [alone[0][:at + 1], *alone[1:]]
    (error,) = errors
    assert isinstance(error, UnsupportedTarget)
    assert f"request 'r0': the target's logits after {5 + at + 1} tokens are not finite (NaN or infinity)" in str(error)
    with pytest.raises(UnsupportedTarget, match="damaged, or its states overflow in float32"):
        Engine(damaged, OracleDrafter(320, target=targets["llama"])).generate(given[:1], CHAIN)
