"""Tiny random targets with a real tokenizer and chat template: created in seconds, of the same classes as real ones."""

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.get('tool_calls') %}{{ m['tool_calls'] | tojson }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "What is the sum of twelve and thirty?", "The answer is forty two.", "def add(a, b):\n    return a + b",
    '{"name": "weather", "arguments": {"city": "Oslo"}}', "Please write a short letter to the town office.",
]


def tiny_target(path: Path, family: str = "llama", seed: int = 0, *, num_layers: int = 4, hidden_size: int = 32,
                vocab_size: int = 320, tie_word_embeddings: bool = False, dtype: str = "float32",
                device: str = "cpu", **overrides: Any) -> Path:
    """Write a random Hugging Face model directory of `family` (a `model_type` of transformers); return its path.

    `device` draws the weights: billions take a GPU a second."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT * 4, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    eos = fast.convert_tokens_to_ids("<|im_end|>")
    settings: dict[str, Any] = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden_size // 4, "vocab_size": vocab_size,
        "max_position_embeddings": 512, "tie_word_embeddings": tie_word_embeddings, "eos_token_id": eos,
        "bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
    } | overrides
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def chats_file(path: Path, num: int = 12) -> Path:
    """Write a JSONL of small distinct OpenAI-format conversations."""
    rows = [{"messages": [{"role": "user", "content": f"What is {i} plus {2 * i}?"},
                          {"role": "assistant", "content": f"The answer is {3 * i}."}]} for i in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_mimo(path: Path, *, with_mtp: bool = True, **settings: Any) -> Path:
    """`tiny_target` as MiMo: a Qwen 2 with a random layer for multi-token prediction, under MiMo's names."""
    import torch
    from safetensors.torch import load_file, save_file

    from eyrie_api.planning.drafter_rules import expected_tensors

    config = json.loads((tiny_target(path, "qwen2", **settings) / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": int(with_mtp)}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    if with_mtp:
        dtype = weights["model.norm.weight"].dtype
        weights |= {name: (0.3 * torch.randn(shape, generator=generator) if len(shape) > 1 else
                           1 + 0.1 * torch.randn(shape, generator=generator)).to(dtype)
                    for name, shape in expected_tensors("mtp", config).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
