"""speculators 0.9.0's offline EAGLE-3 path on a CPU; runs in its environment (`environments/setup`).

    python drive_speculators.py prepare|train --task task.json

*prepare* writes what its `prepare-data` and `generate-offline-data` leave (the latter needs vLLM): an Arrow data set of
`input_ids`, `loss_mask`, `seq_len`, and one `hs_<i>.safetensors` per row in bfloat16: aux states and the last one.

*train* calls its own classes: `ArrowDataset`, its packing sampler and collator (`_setup_dataloader`),
`build_vocab_mappings_from_distribution`, `Eagle3DraftModel.from_training_args`, `build_optimizers`, `save_pretrained`.
Differences forced by the CPU: `draft_attn_impl="sdpa"` (flex attention has no backward there),
`loss_implementation="eager"` in place of its Triton kernels, no torch.compile (it requires CUDA), no loader processes
on two cores, and its loop written here in seven lines, because its `Trainer` moves the model to accelerator 0. float32,
as all peers here.

Configured like the others: seven steps, decay 0.8, KL, AdamW, no norms around `fc` (its own defaults: three steps,
decay 1, Muon, norm_before_fc and norm_output). Its drafter's lm_head is the target's own rows and stays frozen: its
method.
"""

import argparse
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from spent import Spent
from transformers import AutoConfig, get_linear_schedule_with_warmup


def prepare(task: dict[str, Any]) -> None:
    """Convert raw rows to speculators' data set and hidden-state files."""
    rows = [load_file(path) for path in sorted(Path(task["raw"]).glob("row-*.safetensors"))]
    place = Path(task["store"])
    data = Dataset.from_dict({
        "input_ids": [row["token_ids"].tolist() for row in rows],
        "loss_mask": [row["loss_mask"].long().tolist() for row in rows],
        "seq_len": [row["token_ids"].numel() for row in rows]})
    data.set_format(type="torch", columns=["input_ids", "loss_mask"], output_all_columns=True)
    data.save_to_disk(str(place))
    (place / "hidden_states").mkdir()
    # It stores the last state as it is before the target's final norm and applies that norm itself. This one is norm
    # invariant, so the state after it, divided by its weight, can replace the one before.
    scale = load_file(Path(task["target"]) / "model.safetensors")["model.norm.weight"].float()
    for number, row in enumerate(rows):
        states = torch.cat([row["aux"], (row["last"] / scale)[:, None]], dim=1).bfloat16()
        save_file({"token_ids": row["token_ids"], "hidden_states": states.contiguous()},
                  place / "hidden_states" / f"hs_{number}.safetensors")


def train(task: dict[str, Any]) -> None:
    """Train a drafter on the data set and save it in speculators' format."""
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    spent = Spent(task["skip"])
    out = Path(task["out"])
    verifier = AutoConfig.from_pretrained(task["target"])
    data = ArrowDataset(max_len=task["total_seq_len"], datapath=task["store"], on_missing="raise",
                        hidden_states_dtype=torch.float32)
    counts: dict[int, int] = {}
    for item in data.data:
        for token in item["input_ids"][item["loss_mask"].bool()].tolist():
            counts[token] = counts.get(token, 0) + 1
    d2t, t2d = build_vocab_mappings_from_distribution(counts, task["draft_vocab"], verifier.vocab_size)
    layer = AutoConfig.from_pretrained(task["target"])
    layer.num_hidden_layers, layer.intermediate_size = 1, task["intermediate"]
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=task["draft_vocab"], norm_before_residual=False,
        norm_before_fc=False, fc_norm=False, norm_output=False, target_layer_ids=task["aux_layers"],
        ttt_steps=task["ttt"], verifier_name_or_path=task["target"], draft_attn_impl="sdpa").float()
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=task["ttt"], ttt_step_loss_decay=0.8)
    loader = _setup_dataloader(data, task["total_seq_len"], layer.hidden_size, num_workers=0, prefetch_factor=None,
                               preprocess=shift_batch, seed=task["seed"])
    config = TrainerConfig(lr=task["learning_rate"], num_epochs=math.ceil(task["epochs"]), save_path=str(out),
                           weight_decay=0.0)
    optimizers = build_optimizers(model, config)
    steps = round(task["epochs"] * len(loader))
    schedulers = [get_linear_schedule_with_warmup(optimizer, round(task["warmup_ratio"] * steps), steps)
                  for optimizer in optimizers]
    model.train()
    for epoch in range(math.ceil(task["epochs"])):
        loader.batch_sampler.set_epoch(epoch)
        spent.begin()
        for batch in islice(loader, steps - epoch * len(loader)):
            inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
            _, loss, _ = model(**inputs, **call)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepped in (*optimizers, *schedulers):
                stepped.step()
            documents = batch["document_ids"]
            # Shifting drops the first token of each row; it is counted, as for the other programs.
            real = int((documents >= 0).sum()) + int(documents.max()) + 1
            spent.end(real, documents.numel(), float(loss.detach()))
            spent.begin()
    spent.write(out / "spent.json", drafter=str(out / "drafter"), trainable=sum(
        one.numel() for one in model.parameters() if one.requires_grad))
    model.save_pretrained(out / "saved")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("prepare", "train"))
    parser.add_argument("--task", type=Path, required=True)
    args = parser.parse_args()
    {"prepare": prepare, "train": train}[args.verb](json.loads(args.task.read_text()))
