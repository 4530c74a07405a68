"""Chat templates in the manner of published families, written for these tests: their traps, not their text.

One file per family. What each does that others do not: Llama 3 puts tools into the first user turn and trims; Qwen 3
and GLM 4.5 drop the reasoning before the last question; Gemma 3 folds the system prompt into the first user turn and
demands that roles alternate; Mistral demands ids of nine characters; DeepSeek V3 joins arguments to text; GLM 4.5
iterates over arguments; gpt-oss knows `developer` and calls reasoning `thinking`; Phi 4 has no place for tools;
Command reads content as parts; OLMo 3 writes results as `environment`; SmolLM has a system prompt of its own.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama3", "qwen3", "gemma3", "mistral", "deepseek_v3", "glm45", "gpt_oss", "phi4", "granite", "command",
            "olmo3", "smollm")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
           "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|start|>",
           "<|message|>", "<|end|>", "<|channel|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
           "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")


def write_tokenizer(directory: Path, family: str) -> Path:
    """A byte-level tokenizer with the special tokens of all families, and the template of one; no model."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}')
    (directory / "chat_template.jinja").write_text((Path(__file__).parent / f"{family}.jinja").read_text())
    return directory
