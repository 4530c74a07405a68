"""Names of the files in a drafter directory and of the dtypes its tensors may have; the same for every family."""

CONFIG, WEIGHTS, CARD, README = "config.json", "model.safetensors", "eyrie-card.json", "README.md"
DTYPES = ("float32", "bfloat16", "float16")
