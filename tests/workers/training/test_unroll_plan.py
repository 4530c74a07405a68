"""What is supervised, and that tiles and prefixes name it all exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.training import unroll_plan
from eyrie_workers.training.unroll_plan import count_steps, plan_unroll, split_plan

MASKS = st.lists(st.booleans(), min_size=1, max_size=40)


@given(mask=MASKS, steps=st.integers(1, 8))
def test_a_step_is_alive_exactly_while_root_and_proposals_are_answer_tokens(mask: list[bool], steps: int) -> None:
    life = count_steps(np.array(mask), steps)
    for i in range(len(mask)):
        for step in range(steps):
            tokens = range(i + 1, i + 3 + step)
            assert (life[i] > step) == all(t < len(mask) and mask[t] for t in tokens)


def test_the_first_answer_token_is_a_root_and_the_last_is_predicted() -> None:
    # prompt 0 1 2, answer 3 4 5: position 2 (root token 3) predicts 4 and 5, position 3 (root token 4) predicts 5.
    assert count_steps(np.array([False] * 3 + [True] * 3), 7).tolist() == [0, 0, 2, 1, 0, 0]


@given(masks=st.lists(MASKS, min_size=1, max_size=8), steps=st.integers(1, 6))
def test_roots_are_ordered_by_life_and_every_root_has_its_own_cell(masks: list[list[bool]], steps: int) -> None:
    mask = torch.tensor([bit for one in masks for bit in one])
    plan = plan_unroll(mask, [len(one) for one in masks], steps)
    life = np.concatenate([count_steps(np.array(one), steps) for one in masks])
    assert sorted(plan.roots.tolist()) == np.flatnonzero(life).tolist()
    for step, alive in enumerate(plan.alive):
        assert set(plan.roots[:alive].tolist()) == set(np.flatnonzero(life > step).tolist())
        cells, sizes = plan.query_cells(step) if alive else (torch.zeros(0), ())
        assert cells.unique().numel() == alive
        assert alive == 0 or 0 <= int(cells.min()) <= int(cells.max()) < sum(sizes)
    assert plan.num_predictions == int(life.sum())


@given(masks=st.lists(MASKS, min_size=1, max_size=8), step=st.integers(0, 2), block=st.sampled_from([3, 8, 128]))
def test_in_a_tile_a_root_sees_the_positions_up_to_itself_in_its_own_document(masks: list[list[bool]], step: int,
                                                                              block: int) -> None:
    mask = torch.tensor([bit for one in masks for bit in one])
    lengths = [len(one) for one in masks]
    plan = plan_unroll(mask, lengths, 3, query_block=block)
    if plan.alive[step] == 0:
        return
    cells, _ = plan.query_cells(step)
    document = np.repeat(np.arange(len(masks)), lengths)
    cell_root = {int(cell): int(root) for cell, root in zip(cells, plan.roots[: plan.alive[step]], strict=True)}
    first_cell = 0
    for tile in plan.tiles:
        num_queries, hidden = tile.num_queries[step], tile.mask_at(step, None)
        assert tile.key_index.unique().numel() == tile.key_index.numel()
        cell_key = {int(cell): int(key) for cell, key in zip(tile.key_cell, tile.key_index, strict=True)}
        for row in range(tile.num_blocks):
            for query in range(num_queries):
                root = cell_root.get(first_cell + row * num_queries + query)
                if root is None:
                    continue
                seen = [cell_key.get(row * tile.num_keys + key) for key in range(tile.num_keys)
                        if not hidden[row, 0, query, key]]
                own = [i for i in range(len(document)) if document[i] == document[root] and i <= root]
                assert seen == own
        first_cell += tile.num_blocks * num_queries


@given(mask=MASKS, data=st.data())
def test_a_position_not_drawn_deep_keeps_its_first_step_only(mask: list[bool], data: st.DataObject) -> None:
    deep = data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask)))
    whole = plan_unroll(torch.tensor(mask), [len(mask)], 5)
    drawn = plan_unroll(torch.tensor(mask), [len(mask)], 5, torch.tensor(deep))
    assert set(drawn.roots.tolist()) == set(whole.roots.tolist())
    for step in range(1, 5):
        kept = {root for root in whole.roots[: whole.alive[step]].tolist() if deep[root]}
        assert set(drawn.roots[: drawn.alive[step]].tolist()) == kept


@given(masks=st.lists(MASKS, min_size=1, max_size=6), max_roots=st.integers(1, 12))
def test_parts_hold_neighbouring_roots_with_all_their_steps(masks: list[list[bool]], max_roots: int) -> None:
    mask, lengths = torch.tensor([bit for one in masks for bit in one]), [len(one) for one in masks]
    plan = plan_unroll(mask, lengths, 4)
    parts = split_plan(plan, max_roots)
    assert [root for part in parts for root in sorted(part.roots.tolist())] == sorted(plan.roots.tolist())
    assert all(part.roots.numel() <= max_roots for part in parts)
    for part in parts:
        members = torch.zeros_like(mask)
        members[part.roots] = True
        wanted = plan_unroll(mask, lengths, 4, chosen=members)
        assert torch.equal(part.roots, wanted.roots)
        assert part.alive == wanted.alive
        for step, alive in enumerate(part.alive):
            assert alive == 0 or torch.equal(part.query_cells(step)[0], wanted.query_cells(step)[0])


def test_planning_and_splitting_make_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("tiles are of the CPU's attention alone")

    monkeypatch.setattr(unroll_plan, "_tiles", refused)
    plan = plan_unroll(torch.ones(5000, dtype=torch.bool), [3000, 2000], 7)
    assert [part.roots.numel() for part in split_plan(plan, 2048)] == [1666, 1666, 1664]
