"""The rows that every peer trains on, and the target's states over them, written once in a format that all can read.

A row is a conversation of several turns whose length is drawn from a log-normal distribution (median 200 tokens, sigma
0.8, cut to 40..1024): turns that the quickstart target answered itself are concatenated until the length is reached,
and every answer is supervised. Quickstart turns are short and half prompt, so 30 to 60 % of most rows is prompt; the
report contains the actual shares. The target then reads each whole row once, in float32.

    raw/row-00000.safetensors    token_ids [T], loss_mask [T], aux [T, A, H], last [T, H] (after the final norm)
    raw/lengths.json             T of each row
    target/                      the target as the peers' loaders require it, with an index of its one weight file
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eyrie_api.contract.capture import StoredAs
from eyrie_workers.data.rows import AnsweredRow
from eyrie_workers.hidden_states.shard_format import StoreFormat, plan_shards, supervised_positions
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.targets.model import TargetModel
from tests.feature_rows import FeatureRow, write_shard

SHORTEST, LONGEST = 40, 1024
HEAD = "lm_head.weight"
_MEDIAN, _SIGMA = 200, 0.8
_MAX_PROMPT_SHARE = 0.75
"""Of a selected turn: tool definitions are long prompts with short answers, too long for a mix of 30 to 60 %."""


@dataclass(frozen=True)
class Row:
    """One row without hidden states."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def prompt_share(self) -> float:
        """Share of its tokens that is prompt."""
        return 1 - sum(self.loss_mask) / len(self.loss_mask)


def mix(answered: Sequence[AnsweredRow], num_rows: int, seed: int) -> list[Row]:
    """Rows of the length mix; turns are used in a shuffled order and again when they run out."""
    draw = random.Random(seed)
    turns = [row for row in answered
             if len(row.prompt_ids) <= _MAX_PROMPT_SHARE * (len(row.prompt_ids) + len(row.answer_ids))]
    bag: list[AnsweredRow] = []
    rows = []
    for _ in range(num_rows):
        length = round(min(LONGEST, max(SHORTEST, draw.lognormvariate(math.log(_MEDIAN), _SIGMA))))
        tokens: list[int] = []
        mask: list[bool] = []
        while len(tokens) < length:
            if not bag:
                bag = draw.sample(turns, len(turns))
            turn = bag.pop()
            tokens += turn.prompt_ids + turn.answer_ids
            mask += [False] * len(turn.prompt_ids) + [True] * len(turn.answer_ids)
        if not any(mask[:length]):  # a short row that is all prompt keeps its first turn whole
            length = len(tokens)
        rows.append(Row(tuple(tokens[:length]), tuple(mask[:length])))
    return rows


def describe(rows: Sequence[Row]) -> dict[str, float]:
    """Statistics of the mix."""
    lengths = sorted(len(row.token_ids) for row in rows)
    total = sum(lengths)
    return {"rows": len(rows), "tokens": total, "shortest": lengths[0], "median": median(lengths),
            "mean": fmean(lengths), "longest": lengths[-1],
            "supervised_share": sum(sum(row.loss_mask) for row in rows) / total,
            "rows_with_30_to_60_percent_prompt": fmean(.3 <= row.prompt_share <= .6 for row in rows)}


def read_through(target: TargetModel, rows: Sequence[Row], aux_layers: Sequence[int]) -> list[FeatureRow]:
    """Compute the target's states over each row."""
    made = []
    for number, row in enumerate(rows):
        tokens = torch.tensor(row.token_ids)
        with torch.inference_mode():
            (aux, last), = target.hidden_states([tokens], aux_layers)
        made.append(FeatureRow(f"row-{number:05}", tokens, torch.tensor(row.loss_mask), aux.float(), last.float()))
    return made


def write_raw(rows: Sequence[FeatureRow], directory: Path) -> None:
    """Write the files that the peers' preparation reads."""
    directory.mkdir(parents=True)
    for row in rows:
        save_file({"token_ids": row.token_ids, "loss_mask": row.loss_mask, "aux": row.aux.contiguous(),
                   "last": row.last.contiguous()}, directory / f"{row.row_id}.safetensors")
    (directory / "lengths.json").write_text(json.dumps([row.token_ids.numel() for row in rows]))


def write_store(rows: Sequence[FeatureRow], directory: Path, aux_layers: tuple[int, ...], target_digest: str) -> None:
    """Write Eyrie's store of the same rows, in the default codec."""
    stored = StoredAs("int8")
    layout = StoreFormat(aux_layers=aux_layers, hidden_size=rows[0].last.shape[-1], codec=stored.codec,
                         target_digest=target_digest, final_state=stored.final_state)
    writer = FeatureWriter(directory, layout)
    lengths = [row.token_ids.numel() for row in rows]
    taught = [int(supervised_positions(row.loss_mask).sum()) for row in rows]
    for number, shard in enumerate(plan_shards(lengths, layout, 1 << 28, taught)):
        write_shard(writer, [rows[index] for index in shard], number)
    writer.finish()


def link_target(target: Path, directory: Path) -> None:
    """Link the target for loaders that require an index of its shards and an output matrix of its own: one that is tied
    to the embedding is written a second time, under its name."""
    directory.mkdir(parents=True)
    for file in target.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        files = dict.fromkeys(weights.keys(), "model.safetensors")
        if HEAD not in files:
            save_file({HEAD: weights.get_tensor("model.embed_tokens.weight")}, directory / "head.safetensors")
            files[HEAD] = "head.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def size_bytes(directory: Path) -> int:
    """Total size of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
