"""Findings about a directory of a target's MTP layers (`drafters.mtp`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from eyrie_api.decisions.sglang_support import MTP_ARCHITECTURES
from eyrie_workers.drafters.validation.finding import Finding, error
from eyrie_workers.drafters.validation.target import Target, vocabulary_rules


def check_mtp_layers(config: Mapping[str, Any], target: Target | None) -> Iterator[Finding]:
    """Whether SGLang drafts with them, and whether they are of `target`."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in MTP_ARCHITECTURES:
        yield error("architecture-unknown", f"it holds MTP layers of {name}, which SGLang does not draft with",
                    f"MTP layers of {', '.join(MTP_ARCHITECTURES)} are served")
    if target is None:
        return
    if target.architecture != name:
        yield error("target-differs", f"it holds MTP layers of {name}, the target is {target.architecture}",
                    "serve them with the target they were copied from")
    text = config.get("text_config")
    yield from vocabulary_rules(text if isinstance(text, Mapping) else config, target)
