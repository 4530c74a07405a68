"""The stand-in kernels against plain Python: trees and their verification, the slots of a step, attention."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent / "environment" / "stand_in"))

from sgl_kernel import attention, cache, trees, verification

FULL, QLEN = trees.FULL_MASK, trees.QLEN_ONLY


@st.composite
def grown_trees(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    """(top-k, parent list, kept candidates, parent candidate of each kept one): as SGLang's drafter hands them over."""
    topk, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    parent_of = [-1] * topk  # by candidate
    parent_list, frontier = [-1], list(range(topk))
    for _ in range(1, num_steps):
        parent_list += frontier
        first = len(parent_of)
        parent_of += [parent for parent in frontier for _ in range(topk)]
        frontier = draw(st.permutations(range(first, len(parent_of))))[:topk]
    kept = sorted(draw(st.sets(st.integers(0, len(parent_of) - 1), min_size=1, max_size=12)))
    return topk, parent_list, kept, [parent_of[candidate] for candidate in kept]


def walk_up(kept: list[int], parent_of: list[int], node: int) -> list[int] | None:
    """Nodes from `node` to the root, root last; None when one of them is not in the tree."""
    path = [node]
    while path[-1]:
        parent = parent_of[path[-1] - 1]
        if parent == -1:
            path.append(0)
        elif parent in kept:
            path.append(kept.index(parent) + 1)
        else:
            return None
    return path


@settings(max_examples=150, deadline=None)
@given(st.lists(grown_trees(), min_size=1, max_size=3), st.lists(st.integers(0, 9), min_size=3, max_size=3),
       st.sampled_from([FULL, QLEN]))
def test_tree_layout_equals_a_walk_to_the_root(grown: list[tuple[int, list[int], list[int], list[int]]],
                                              lengths: list[int], mode: int) -> None:
    topk, parent_list, kept, parent_of = grown[0]
    num_nodes, rows = len(kept) + 1, len(grown)
    lengths = lengths[:rows]
    mask = torch.ones(sum(num_nodes * (num_nodes + (length if mode == FULL else 0)) for length in lengths),
                      dtype=torch.bool)
    positions = torch.full((rows * num_nodes,), -7)
    index, child, sibling = torch.full((3, rows, num_nodes), -1)
    trees.build_tree_kernel_efficient_cpu(
        torch.tensor([parent_list] * rows), torch.tensor([kept] * rows), torch.tensor(lengths), mask, positions, index,
        child, sibling, topk, 5, num_nodes, mode)
    paths = [walk_up(kept, parent_of, node) for node in range(num_nodes)]
    starts = 0
    for row, length in enumerate(lengths):
        prefix = length if mode == FULL else 0
        block = mask[starts: starts + num_nodes * (prefix + num_nodes)].view(num_nodes, prefix + num_nodes)
        starts += block.numel()
        assert bool(block[:, :prefix].all())
        assert index[row].tolist() == list(range(row * num_nodes, (row + 1) * num_nodes))
        for node, path in enumerate(paths):
            if path is not None:
                assert torch.nonzero(block[node, prefix:]).flatten().tolist() == sorted(path)
                assert int(positions[row * num_nodes + node]) == length + len(path) - 1
        for node in range(num_nodes):
            children = [other for other in range(1, num_nodes) if (path := walk_up(kept, parent_of, other)) is not None
                        and path[1] == node] if paths[node] is not None else None
            if children is not None:
                assert linked(child[row].tolist(), sibling[row].tolist(), node) == children


def linked(child: list[int], sibling: list[int], node: int) -> list[int]:
    found, at = [], child[node]
    while at != -1:
        found.append(at)
        at = sibling[at]
    return found


@settings(max_examples=150, deadline=None)
@given(grown_trees(), st.data())
def test_verification_takes_the_path_the_target_agrees_with(grown: tuple[int, list[int], list[int], list[int]],
                                                           data: st.DataObject) -> None:
    topk, parent_list, kept, _ = grown
    num_nodes = len(kept) + 1
    parents = trees.parents_of(parent_list, kept, topk)
    child, sibling = trees.links(parents)
    # Few token values, so that agreement happens; siblings carry distinct ones, as top-k gives them.
    tokens, wanted = [0], data.draw(st.lists(st.integers(0, 5), min_size=num_nodes, max_size=num_nodes))
    for node in range(1, num_nodes):
        taken = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
        tokens.append(data.draw(st.sampled_from([token for token in range(20) if token not in taken][:6])))
    longest = data.draw(st.integers(1, 6))
    rows = 2
    predicts = torch.zeros(rows * num_nodes, dtype=torch.int32)
    accepted = torch.full((rows, longest), -1, dtype=torch.int32)
    counts = torch.empty(rows, dtype=torch.int32)
    verification.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accepted, accept_token_num=counts, candidates=torch.tensor([tokens] * rows),
        retrive_index=torch.arange(rows * num_nodes).view(rows, num_nodes),
        retrive_next_token=torch.tensor([child] * rows), retrive_next_sibling=torch.tensor([sibling] * rows),
        target_predict=torch.tensor([wanted] * rows))
    path = [0]
    while len(path) < longest:
        matching = [node for node in range(1, num_nodes)
                    if parents[node] == path[-1] and tokens[node] == wanted[path[-1]]]
        if not matching:
            break
        path.append(matching[0])
    for row in range(rows):
        offset = row * num_nodes
        assert counts[row] == len(path) - 1
        assert accepted[row].tolist() == [node + offset for node in path] + [-1] * (longest - len(path))
        assert [int(predicts[node + offset]) for node in path] == [wanted[node] for node in path]


@settings(max_examples=60, deadline=None)
@given(grown_trees(), st.integers(0, 9))
def test_metadata_from_a_mask_equals_metadata_from_parents(grown: tuple[int, list[int], list[int], list[int]],
                                                          length: int) -> None:
    topk, parent_list, kept, _ = grown
    parents = trees.parents_of(parent_list, kept, topk)
    if -1 in parents:
        return
    num_nodes = len(parents)
    seen, depths = trees.lineage(parents)
    positions, index, child, sibling = (torch.full((num_nodes,), -7) for _ in range(4))
    trees.reconstruct_indices_from_tree_mask(seen.flatten(), torch.tensor([length]), positions, index, child, sibling,
                                             1, num_nodes)
    assert positions.tolist() == (depths + length).tolist()
    assert (child.tolist(), sibling.tolist()) == trees.links(parents)
    assert index.tolist() == list(range(num_nodes))


def test_slots_are_read_and_entered_stretch_by_stretch() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([6, 7])
    out = torch.zeros(5, dtype=torch.int64)
    cache.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, 10)
    assert out.tolist() == [23, 24, 25, 5, 6]
    cache.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([90, 91, 92, 93, 94]), 10)
    assert (table[2, 3:6].tolist(), table[0, 5:7].tolist()) == ([90, 91, 92], [93, 94])
    drafts = torch.zeros(8, dtype=torch.int64)
    cache.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1, 3]), table, torch.tensor([2, 4]), drafts, 10, 2, 2)
    assert drafts.tolist() == [12, 13, 14, 15, 34, 35, 36, 37]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_every_branch_reads_the_text_and_the_slots_it_writes(topk: int) -> None:
    """Draft step s of branch k writes column length + k * steps + s, and reads s + 1 of its own behind the text."""
    steps, lengths, requests = 3, [4, 1], [2, 0]
    table = torch.arange(60).view(3, 20)
    written = torch.zeros(len(requests) * topk * steps, dtype=torch.int64)
    cache.assign_draft_cache_locs_contiguous_cpu(torch.tensor(requests), table, torch.tensor(lengths), written, 20,
                                                 topk, steps)
    read = cache.build_draft_decode_metadata_cpu(table, torch.tensor(requests), torch.tensor(lengths), topk, steps, 20)
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        for branch in range(topk):
            own = written.view(len(requests), topk, steps)[row, branch].tolist()
            assert read[row * topk + branch, : length + steps].tolist() == table[request, :length].tolist() + own


def test_accepted_slots_are_packed_and_moved_all_at_once() -> None:
    locs, packed = torch.tensor([10, 11, 12, 13, 14, 15]), torch.zeros(6, dtype=torch.int64)
    cache.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), locs, packed)
    assert packed.tolist() == [10, 12, 13, 0, 0, 0]
    bonus = torch.zeros(2, dtype=torch.int32)
    cache.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]
    keys = torch.arange(24, dtype=torch.float32).view(6, 4)
    values = keys.double() + 100
    before = keys.clone(), values.clone()
    cache.copy_all_layer_kv_cache_cpu(
        torch.tensor([keys.data_ptr(), values.data_ptr()]), torch.tensor([16, 32]), torch.tensor([1, 2, 0]),
        torch.tensor([2, 1, 0]))
    for buffer, old in zip((keys, values), before, strict=True):
        assert torch.equal(buffer, old[[0, 2, 1, 3, 4, 5]])


def test_rotation_shifts_each_request_and_puts_the_new_token_last() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5])
    cache.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([8, 9]))
    assert ids.tolist() == [2, 3, 8, 5, 9]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_new_tokens_attend_like_one_query_after_the_other(masked: bool, window: int) -> None:
    """`extend` over several tokens equals `decode` of each alone over exactly the slots it may see."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head, total, new = 4, 2, 8, 9, 4
    keys, values = (torch.randn(20, kv_heads, head, generator=generator) for _ in range(2))
    query = torch.randn(new, heads, head, generator=generator)
    slots = torch.randperm(20, generator=generator)[:total]
    table = torch.zeros(2, 20, dtype=torch.int64)
    table[1, :total] = slots
    parents = [0, 0, 0, 1] if masked else [0, 0, 1, 2]
    seen = trees.lineage(parents)[0]
    output = torch.zeros_like(query)
    attention.extend_attention(
        query, None, None, output, keys, values, 1.0, 1.0, table, torch.tensor([1]), torch.tensor([total]),
        torch.tensor([new]), torch.tensor([0]), new, 0.3, 0.0, False, window, None, None,
        seen.flatten() if masked else None, True)
    for node in range(new):
        own = [total - new + other for other in torch.nonzero(seen[node]).flatten().tolist()]
        visible = [*range(total - new), *own]
        visible = visible[-window:] if window else visible
        row = torch.zeros(1, 20, dtype=torch.int64)
        row[0, : len(visible)] = slots[visible]
        alone = torch.zeros(1, heads, head)
        attention.decode_attention(
            query[node: node + 1], keys, values, 1.0, 1.0, alone, None, None, torch.zeros(1), torch.zeros(1), row,
            torch.tensor([0]), torch.tensor([len(visible)]), 0.3, 0.0, False, 0, None, None)
        group = heads // kv_heads
        k, v = keys[slots[visible]].repeat_interleave(group, 1), values[slots[visible]].repeat_interleave(group, 1)
        weights = (torch.einsum("he,lhe->hl", query[node], k) * 0.3).softmax(-1)
        assert torch.allclose(alone[0], torch.einsum("hl,lhe->he", weights, v), atol=1e-6)
        assert torch.allclose(output[node], alone[0], atol=1e-6)
