"""Greedy verification of a draft tree (stand-in; see the package's essay).

The tree comes as links (`trees`): walk from the root along the child whose token is the target's choice at the node
above it. SGLang wants three things: the target's choice at every accepted node, the last of them being the bonus token
(`predicts`, by node of the whole batch); the accepted nodes, root first, -1 beyond (`accept_index`); and how many draft
tokens were accepted (`accept_token_num`, root and bonus not counted).
"""

from torch import Tensor


def verify_tree_greedy_cpu(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                           retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
                           target_predict: Tensor) -> None:
    """Fill `predicts`, `accept_index` and `accept_token_num`; the spelling of the arguments is the caller's."""
    longest = accept_index.shape[1]
    wanted, tokens, numbers = target_predict.tolist(), candidates.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row in range(len(tokens)):
        node, path = 0, [0]
        while len(path) < longest:
            child = first_child[row][node]
            while child != -1 and tokens[row][child] != wanted[row][node]:
                child = next_sibling[row][child]
            if child == -1:
                break
            path.append(child)
            node = child
        for place, taken in enumerate(path):
            predicts[numbers[row][taken]] = wanted[row][taken]
            accept_index[row, place] = numbers[row][taken]
        accept_token_num[row] = len(path) - 1
