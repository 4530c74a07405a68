"""Trains the quickstart target from nothing on two CPU cores, and writes the directory Eyrie ships.

    python -m eyrie_workers.quickstart.pretrain --out target --work work --tokens 1850000

One pass over a generated corpus, 2048 tokens a step: at this size many small steps matter more than large batches
(measured earlier: 24 x 256 tokens a step left the loss at 3.4 where 8 x 256 reached 0.43 on the same number of
tokens). Weights and activations are bfloat16 with float32 masters. The matrices inside the blocks are updated by
Muon (orthogonal updates, Jordan et al. 2024), everything else by AdamW; warm-up, constant rate, linear decay.
Measured here on the first 80k tokens: Muon loss 3.15, AdamW alone at half that rate 5.1; a Muon step takes 1.28 s
instead of 0.9 s and is worth it.

The program may die at any line. It saves its state every few minutes in `<work>/state.pt`, and started again with
the same arguments it goes on from there. It exports a usable model at every save, the final one at the end, card
included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY",
                      "PASSIVE")  # spinning threads starve each other on a shared machine; before torch

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyrie_workers.quickstart import card, tokenizer
from eyrie_workers.quickstart.corpus import Conversation, digest, training_stream
from eyrie_workers.quickstart.llama import Llama, Shape, describe, hugging_face_config, hugging_face_weights
from eyrie_workers.quickstart.packing import TOKENS_PER_STEP, Batch, Encoded, batches
from eyrie_workers.quickstart.practice import practice_stream

SEED = 0
VALIDATION_SEED = 1
NUM_VALIDATION = 400
NUM_TOKENIZER_CONVERSATIONS = 4000
SAVE_EVERY_S = 240.0
LOG_EVERY_STEPS = 20


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the corpus."""

    tokens: int
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    decay_share: float = 0.3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = SEED
    practice_from: int = 6_912
    practice_until: int = 8_704
    """Between these conversations, every second one is followed by copying practice (see practice.py)."""

    @property
    def steps(self) -> int:
        return self.tokens // TOKENS_PER_STEP

    def rate(self, step: int) -> float:
        """Warm-up, constant, linear decay to 2 % of the peak."""
        decay_steps = int(self.steps * self.decay_share)
        left = (self.steps - step) / max(decay_steps, 1)
        return self.learning_rate * min((step + 1) / self.warmup_steps, 1.0, max(left, 0.02))


class Trainer:
    """A bfloat16 model, its float32 masters and their optimizers."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = Llama(shape)
        self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.model.to(torch.bfloat16)
        inner: list[Tensor] = []
        outer: list[Tensor] = []
        for (name, _), master in zip(self.model.named_parameters(), self.masters, strict=True):
            (inner if name.startswith("blocks") and master.dim() == 2 else outer).append(master)
        rate, decay = recipe.learning_rate, recipe.weight_decay
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=rate, betas=recipe.betas, weight_decay=0.0, fused=True),
        ]

    def step(self, batch: Batch, number: int) -> float:
        loss = weighted_loss(self.model(batch.tokens, batch.documents), batch)
        loss.backward()
        parameters: list[Tensor] = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.rate(number)
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.masters)
        return loss.item()

    def state(self) -> dict[str, Any]:
        optimizers = [o.state_dict() for o in self.optimizers]
        return {"masters": self.masters, "optimizers": optimizers, "recipe": asdict(self.recipe)}

    def load(self, state: dict[str, Any]) -> None:
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"state.pt is of {state['recipe']}: repeat those arguments or delete it to start anew")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        with torch.no_grad():
            torch._foreach_copy_(self.masters, state["masters"])
            torch._foreach_copy_(list(self.model.parameters()), self.masters)


def weighted_loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token, weighted; bfloat16 logits, float32 softmax."""
    losses = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), batch.tokens[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def encode(reader: PreTrainedTokenizerBase, conversation: Conversation) -> Encoded:
    row = conversation.row()
    found = reader.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=True,
                                       return_assistant_tokens_mask=True)
    return Encoded(conversation.family, list(found["input_ids"]), list(found["assistant_masks"]))


def train_tokenizer(out: Path) -> None:
    reader = PreTrainedTokenizerFast(tokenizer_object=tokenizer.empty(), chat_template=tokenizer.CHAT_TEMPLATE)
    rows = (c.row() for c in islice(training_stream(SEED), NUM_TOKENIZER_CONVERSATIONS))
    texts = (reader.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False) for r in rows)
    tokenizer.save(tokenizer.train(texts), out)


@torch.no_grad()
def validate(model: Llama, reader: PreTrainedTokenizerBase, num: int) -> dict[str, dict[str, float]]:
    """Loss and top-1 accuracy of answer tokens on `num` unseen conversations, by family, category and `all`."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for conversation in islice(training_stream(VALIDATION_SEED), num):
        encoded = encode(reader, conversation)
        # padded to multiples of 64: few shapes, few kernels to compile
        padded = encoded.tokens + [0] * (-len(encoded.tokens) % 64)
        tokens = torch.tensor([padded])
        logits = model(tokens, torch.ones_like(tokens))[0, : len(encoded.tokens) - 1].float()
        target, answer = tokens[0, 1 : len(encoded.tokens)], torch.tensor(encoded.answer[1:]).float()
        loss = float((F.cross_entropy(logits, target, reduction="none") * answer).sum())
        right = float(((logits.argmax(-1) == target) * answer).sum())
        for key in (conversation.family, conversation.category, "all"):
            sums[key] = [a + b for a, b in zip(sums[key], (loss, right, float(answer.sum())), strict=True)]
    return {k: {"loss": round(v[0] / v[2], 4), "top1": round(v[1] / v[2], 4), "answer_tokens": v[2]} for k,
            v in sums.items()}


def export(model: Llama, out: Path) -> None:
    """`config.json`, `generation_config.json` and `model.safetensors`, the weights renamed into place last."""
    eos, pad = tokenizer.SPECIAL_TOKENS.index(tokenizer.END), tokenizer.SPECIAL_TOKENS.index(tokenizer.PAD)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (out / "config.json").write_text(json.dumps(hugging_face_config(model.shape, eos, pad), indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    aside = out / "model.safetensors.part"
    save_file(hugging_face_weights(model), str(aside), metadata={"format": "pt"})
    aside.chmod(0o644)  # safetensors writes 0600, and a wheel keeps the mode
    os.replace(aside, out / "model.safetensors")


class Lesson:
    """The training text in order, encoded and counted, so that the card can say exactly which text was seen."""

    def __init__(self, recipe: Recipe, reader: PreTrainedTokenizerBase) -> None:
        self.recipe, self.reader = recipe, reader
        self.num_conversations = self.num_practice = 0

    def __iter__(self) -> Iterator[Encoded]:
        practice = practice_stream(self.recipe.seed)
        for conversation in training_stream(self.recipe.seed):
            self.num_conversations += 1
            yield encode(self.reader, conversation)
            due = self.recipe.practice_from <= self.num_conversations < self.recipe.practice_until
            if due and self.num_conversations % 2 == 0:
                self.num_practice += 1
                yield encode(self.reader, next(practice))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart target.")
    parser.add_argument("--out", type=Path, required=True, help="target directory to write")
    parser.add_argument("--work", type=Path, required=True, help="directory for the resumable state and the log")
    parser.add_argument("--tokens", type=int, default=1_850_000, help="tokens to train on; the schedule ends there")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    run(Recipe(tokens=args.tokens, learning_rate=args.learning_rate), args.out, args.work)


def run(recipe: Recipe, out: Path, work: Path) -> None:
    if not (out / "tokenizer.json").exists():
        train_tokenizer(out)
    reader = tokenizer.load(out)
    trainer, state_path = Trainer(Shape(), recipe), work / "state.pt"
    done: dict[str, Any] = {"step": 0, "tokens": 0, "curve": [], "wall_s": 0.0, "cpu_s": 0.0, "notes": []}
    if state_path.exists():
        saved = torch.load(state_path, weights_only=False)
        trainer.load(saved["trainer"])
        done = saved["done"]
    first, begun, cpu_begun, saved_at = done["step"], time.monotonic(), time.process_time(), time.monotonic()
    wall_before, cpu_before = done["wall_s"], done["cpu_s"]
    source = Lesson(recipe, reader)
    window: list[float] = []
    for number, batch in enumerate(islice(batches(source), recipe.steps)):
        if number < first:
            continue  # replaying the stream is cheaper than storing its state
        window.append(trainer.step(batch, number))
        step, now = number + 1, time.monotonic()
        done["tokens"] += int((batch.documents > 0).sum())
        done |= {"step": step, "wall_s": wall_before + now - begun,
                 "cpu_s": cpu_before + time.process_time() - cpu_begun}
        if step % LOG_EVERY_STEPS == 0 or step == recipe.steps:
            rate = (step - first) / (now - begun)
            mean = sum(window) / len(window)
            window = []
            done["curve"].append([done["tokens"], round(mean, 4)])
            print(f"step {step}/{recipe.steps} tokens {done['tokens']} loss {mean:.4f} "
                  f"{rate * TOKENS_PER_STEP:.0f} tok/s eta {(recipe.steps - step) / rate:.0f} s",
                  flush=True)
        if now - saved_at > SAVE_EVERY_S or step == recipe.steps:
            saved_at = now
            aside = state_path.with_suffix(".part")
            torch.save({"trainer": trainer.state(), "done": done}, aside)
            os.replace(aside, state_path)
            export(trainer.model, out)
            num = NUM_VALIDATION if step == recipe.steps else NUM_VALIDATION // 4
            scores = validate(trainer.model, reader, num)
            print("validation", json.dumps({k: (v["loss"], v["top1"]) for k, v in scores.items()}), flush=True)
            facts = {
                "date": datetime.now(UTC).date().isoformat(),
                "corpus": {
                    "seed": recipe.seed, "num_conversations": source.num_conversations,
                    "digest": digest(source.num_conversations, recipe.seed), "num_practice": source.num_practice,
                },
                "tokens_seen": done["tokens"], "steps": step, "finished": step == recipe.steps,
                "wall_s": round(done["wall_s"]), "cpu_s": round(done["cpu_s"]),
                "recipe": asdict(recipe), "shape": describe(trainer.model.shape),
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "validation": {"seed": VALIDATION_SEED, "num_conversations": num, "scores": scores},
                "curve": done["curve"], "notes": done["notes"],
            }
            card.write(out, facts)


if __name__ == "__main__":
    main()
