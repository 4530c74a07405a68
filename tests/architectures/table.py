"""The table of docs/targets.md: what each architecture can be captured, trained and served with.

    python -m tests.architectures.table [--write]

Its rows are the architectures that tests/architectures captures and trains; engines are looked up where jobs look.
"""

import sys
from pathlib import Path

from eyrie_api.planning.sglang_support import PLUGIN_ARCHITECTURES, SUPPORTED_BY_SGLANG
from eyrie_api.planning.target_config import FAMILIES
from tests.architectures.catalog import ARCHITECTURES, RUN_IN_SGLANG
from tests.architectures.vllm_classes import DRAFTED, SERVED

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "targets.md"
_BEGIN, _END = "<!-- table: tests/architectures/table.py -->\n", "<!-- end of table -->\n"


def rendered() -> str:
    """The table in Markdown."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    lines = ["| `model_type` | class | states from | trained | engine sglang | drafted for in vLLM | engine embedded |",
             "|---|---|---|---|---|---|---|"]
    for model_type in ARCHITECTURES:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        served = "with Eyrie's model package" if name in PLUGIN_ARCHITECTURES else \
            "yes" if name in SUPPORTED_BY_SGLANG else "no capture hook"
        served += ", run" if model_type in RUN_IN_SGLANG else ""
        vllm = "yes" if name in DRAFTED else "no capture hook" if name in SERVED else "not registered"
        known = model_type in FAMILIES
        lines.append(f"| {model_type} | {name} | {'reference' if known else 'transformers'} | yes | {served} | "
                     f"{vllm} | {'yes' if known else 'no'} |")
    return _BEGIN + "\n".join(lines) + "\n" + _END


def main() -> int:
    """Print the table, or write it into the document."""
    if "--write" not in sys.argv[1:]:
        print(rendered())
        return 0
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text[:text.index(_BEGIN)] + rendered() + text[text.index(_END) + len(_END):])
    return 0


if __name__ == "__main__":
    sys.exit(main())
