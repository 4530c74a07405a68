"""SpecForge 0.2.0's offline EAGLE-3 path on a CPU; runs in its environment (`environments/setup`).

    python drive_specforge.py prepare|train --task task.json

*prepare* writes what its `prepare_hidden_states.py` stores (that script needs SGLang and a GPU): one `torch.save` per
row in bfloat16, each padded by its own collator to the longest of the capture batch, 32 rows by default.

*train* calls its own classes: offline reader's file list and loader, normaliser, collator, `TargetHead`,
`LlamaForCausalLMEagle3`, `OnlineEagle3Model`, `Eagle3TrainStrategy`, `FSDPTrainingBackend` (unwrapped: one process),
`BF16Optimizer`, `export_to_sglang`. Differences forced by the CPU: attention backend `sdpa` (flex_attention has no
backward there, `fa` and `usp` need CUDA), its reference loss in place of its Triton kernel, and no torch.compile (its
launcher's role, `Trainer`, wants a process group of GPUs). float32 throughout, as all peers here; rows one by one, as
its recipes do.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file
from specforge.algorithms.eagle3 import model as eagle3_model
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.preprocessing import process_token_dict_to_mappings
from specforge.data.utils import DataCollatorWithPadding
from specforge.export.to_sglang import export_to_sglang
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import list_feature_files
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.strategies.base import Eagle3TrainStrategy
from specforge.training.vocab_mapping import count_effective_feature_tokens
from spent import Spent

MAX_LENGTH = 2048


class ReferenceLoss:
    """SpecForge's reference formula in place of its kernel."""

    apply = staticmethod(_compute_loss)


def prepare(task: dict[str, Any]) -> None:
    """Convert raw rows to SpecForge's feature files."""
    rows = [load_file(path) for path in sorted(Path(task["raw"]).glob("row-*.safetensors"))]
    collate, size = DataCollatorWithPadding(), task["capture_batch"]
    place = Path(task["store"]) / "rows_0-2000"
    place.mkdir(parents=True)
    for start in range(0, len(rows), size):
        group = rows[start:start + size]
        padded = collate([{
            "input_ids": row["token_ids"][None], "loss_mask": row["loss_mask"][None].long(),
            "attention_mask": torch.ones_like(row["token_ids"])[None],
            # States of padding are zeros here and the target's in SpecForge: masked in both cases.
            "hidden_state": row["aux"].flatten(1)[None], "target": row["last"][None]} for row in group])
        for offset in range(len(group)):
            torch.save({
                "input_ids": padded["input_ids"][offset].clone(), "loss_mask": padded["loss_mask"][offset].clone(),
                "hidden_state": padded["target"][offset:offset + 1].bfloat16().clone(),
                "aux_hidden_state": padded["hidden_state"][offset:offset + 1].bfloat16().clone(),
            }, place / f"data_{start + offset}.ckpt")


def batches(task: dict[str, Any], files: list[str], lengths: list[int], num: int) -> Iterator[tuple[list[str], int]]:
    """`num` batches of files, in a new order every epoch, with their real tokens."""
    order, size = list(range(len(files))), task["train_batch"]
    shuffle = random.Random(task["seed"])
    while True:
        shuffle.shuffle(order)
        for start in range(0, len(order), size):
            if not num:
                return
            num -= 1
            batch = order[start:start + size]
            yield [files[number] for number in batch], sum(lengths[number] for number in batch)


def train(task: dict[str, Any]) -> None:
    """Train a drafter on the feature files and export it in SGLang's format."""
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    eagle3_model.LogSoftmaxLoss = ReferenceLoss
    spent = Spent(task["skip"])
    out, target = Path(task["out"]), json.loads((Path(task["target"]) / "config.json").read_text())
    files = list_feature_files(task["store"])
    counts = count_effective_feature_tokens(task["store"], max_length=MAX_LENGTH)
    d2t, t2d = process_token_dict_to_mappings(counts, task["draft_vocab"], target["vocab_size"])
    torch.save({"d2t": d2t, "t2d": t2d}, out / "vocab_mapping.pt")
    keep = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters", "bos_token_id",
            "eos_token_id", "pad_token_id")
    (out / "draft.json").write_text(json.dumps({name: target.get(name) for name in keep} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "intermediate_size": task["intermediate"], "draft_vocab_size": task["draft_vocab"],
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in task["aux_layers"]],
                         "use_aux_hidden_state": True}}))
    draft = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(out / "draft.json")),
                                       attention_backend="sdpa", torch_dtype=torch.float32)
    draft.load_vocab_mapping(str(out / "vocab_mapping.pt"))
    draft.load_embedding(task["target"])
    draft.freeze_embedding()
    model = eagle3_model.OnlineEagle3Model(draft, length=task["ttt"], attention_backend="sdpa")
    head = TargetHead.from_pretrained(task["target"]).float()
    collate = DataCollatorWithPadding()
    steps = round(task["epochs"] * -(-len(files) // task["train_batch"]))
    backend = FSDPTrainingBackend(ParallelConfig(param_dtype=torch.float32), optimizer_factory=lambda module:
                                  BF16Optimizer(module, task["learning_rate"], total_steps=steps,
                                                warmup_ratio=task["warmup_ratio"]))
    strategy = Eagle3TrainStrategy(backend.prepare_model(model, wrap=False, optimizer_target=draft), target_head=head)
    lengths = json.loads((Path(task["raw"]) / "lengths.json").read_text())
    real = [lengths[int(Path(file).stem.removeprefix("data_"))] for file in files]
    backend.module.train()
    spent.begin()
    for names, tokens in batches(task, files, real, steps):
        tensors = collate([normalize_offline_sample(load_feature_file(name), MAX_LENGTH) for name in names])
        tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()
                   if value is not None}
        output = strategy.forward_loss(TrainBatch(names, "eagle3", tensors, {"target_repr": "hidden_state"}))
        backend.backward(output.loss)
        backend.step()
        spent.end(tokens, tensors["input_ids"].numel(), float(output.loss.detach()))
        spent.begin()
    state = {f"draft_model.{name}": value for name, value in draft.state_dict().items()}
    torch.save({"draft_state_dict": strategy.checkpoint_state_filter(state), "strategy": "eagle3"},
               out / "training_state.pt")
    spent.write(out / "spent.json", drafter=str(out / "drafter"))
    export_to_sglang(str(out), str(out / "draft.json"), str(out / "drafter"),
                     vocab_mapping_path=str(out / "vocab_mapping.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("prepare", "train"))
    parser.add_argument("--task", type=Path, required=True)
    args = parser.parse_args()
    {"prepare": prepare, "train": train}[args.verb](json.loads(args.task.read_text()))
