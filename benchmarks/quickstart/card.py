"""The model card of the quickstart target: `card.json` for programs, `README.md` for readers."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

LICENCE = "Apache-2.0"


def write(out: Path, facts: dict[str, Any]) -> None:
    card = {"licence": LICENCE, **facts, "hardware": hardware(), "torch": torch.__version__,
            "python": platform.python_version()}
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (out / "README.md").write_text(readme(card))


def hardware() -> str:
    cores = torch.get_num_threads()
    return f"{cores} CPU cores ({platform.machine()}), {torch.backends.cpu.get_cpu_capability()}"


def readme(card: dict[str, Any]) -> str:
    """The card as Markdown; every figure comes from `card.json`."""
    corpus, scores, shape = card["corpus"], card["validation"]["scores"], card["shape"]
    curve = card["curve"]
    # A slow machine saves for the first time before it has logged a point.
    shown = [curve[i] for i in sorted({round(k * (len(curve) - 1) / 9) for k in range(10)})] if curve else []
    categories = [k for k in ("chat", "math", "code", "tools", "library") if k in scores]
    families = sorted(k for k in scores if k not in (*categories, "all"))

    def line(name: str) -> str:
        of = scores[name]
        return f"| {name} | {of['loss']:.3f} | {of['top1']:.3f} | {of['entropy']:.3f} |"

    return "\n".join((
        f"# {card['name'].replace('-', ' ').capitalize()}", "",
        "A chat model small enough to be trained on two processor cores, so that drafters are trained for a real",
        "target without a network. It talks inside the families it was trained on and knows nothing else. It is a test",
        "object for speculative decoding and not an assistant: its sums can be wrong and its facts are few.", "",
        f"- {card['parameters'] / 1e6:.1f}M parameters, {shape['num_layers']} layers, hidden {shape['hidden_size']}, "
        f"vocabulary {shape['vocab_size']}, bfloat16",
        f"- licence {card['licence']}; trained "
        f"{card['date']}{'' if card['finished'] else ' (training unfinished)'}",
        *(f"- {note}" for note in card["notes"]),
        f"- {card['tokens_seen']} tokens in {card['steps']} steps, {card['wall_s']} s wall, {card['cpu_s']} s CPU, "
        f"{card['hardware']}, torch {card['torch']}, Python {card['python']}", "",
        "## Data", "",
        card["about"],
        "Templates are small talk, advice, travel, letters, rewriting, explanations; sums and word problems with",
        "working; Python, SQL and reading code; tool calls, JSON extraction, tables.",
        f"Stream {corpus['seed']}, first {corpus['num_conversations']} conversations, {corpus['digest']}.",
        "Prompts whose normalised text hashes to 0 modulo 64 are held out of every stream; the suites consist of "
        "these.",
        "No conversation is longer than 512 tokens, so longer contexts are untested although the configuration allows "
        "2048.", "",
        f"## Validation: answer tokens of {card['validation']['num_conversations']} conversations of stream "
        f"{card['validation']['seed']}", "",
        "| | loss, nats | top-1 | entropy, nats |", "| --- | --- | --- | --- |",
        *map(line, ("all", *categories, *families)), "",
        "## Training loss (answers weigh 1, prompts 0.2)", "",
        "| tokens | loss |", "| --- | --- |", *(f"| {t} | {v:.3f} |" for t, v in shown), "",
    ))
