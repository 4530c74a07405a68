"""What SGLang's own heads of DSpark give for one block: logits that are added, and confidences. Run by SGLang's Python.

    python markov_bias.py DRAFTER BLOCK.safetensors OUT.safetensors

BLOCK   `hidden` [B, S, H] behind the final norm, `tokens` [B, S]: the one before each proposed token
OUT     `bias` [B, S, V], `confidence` [B, S]
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.models.dspark import build_confidence_head, build_markov_head
from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config


def main(drafter: str, block_file: str, out: str) -> None:
    config = json.loads((Path(drafter) / "config.json").read_text())
    parsed = parse_dspark_draft_config(draft_hf_config=SimpleNamespace(**config))
    head = build_markov_head(SimpleNamespace(**config))
    assert (parsed.markov_rank, parsed.markov_head_type) == (head.markov_rank, config["markov_head_type"])
    assert parsed.gamma == config["block_size"]
    weights = load_file(Path(drafter) / "model.safetensors")
    head.load_state_dict({name.removeprefix("markov_head."): tensor for name, tensor in weights.items()
                          if name.startswith("markov_head.")})
    confidence = build_confidence_head(SimpleNamespace(**config))
    confidence.load_state_dict({name.removeprefix("confidence_head."): tensor for name, tensor in weights.items()
                                if name.startswith("confidence_head.")})
    block = load_file(block_file)
    hidden, tokens, steps = block["hidden"], block["tokens"], []
    with torch.no_grad():
        state = head.init_state(hidden)
        for step in range(tokens.shape[1]):
            bias, state = head.step_bias(tokens[:, step], hidden_states=hidden[:, step], state=state)
            steps.append(bias)
        # The drafted tokens are shifted by one, and no step reads the last of them.
        predicted, _ = confidence.predict(hidden, anchor_tokens=tokens[:, 0], draft_tokens=tokens.roll(-1, 1),
                                          markov_head=head)
    save_file({"bias": torch.stack(steps, 1), "confidence": predicted}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
