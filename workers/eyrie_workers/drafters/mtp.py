"""The MTP layers of a target as a drafter directory, which SGLang loads like any other draft model.

The directory has the target's config.json, marked as a drafter, and the tensors of the MTP layers alone: it can be
uploaded, measured, tuned, proven and served without the target's other files. Eyrie does not compute these layers
itself. Which targets have them: `eyrie_api.decisions.sglang_support`.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from eyrie_api.decisions.sglang_support import MARK, mtp_tensors
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.drafters.export import write_directory
from eyrie_workers.targets.config import read_json


def copy_mtp_layers(target: Path, out: Path) -> None:
    """Write the MTP layers of the target in `target` to `out`, replacing an existing directory.

    Raises UnsupportedTarget when it has none or SGLang does not draft with them, ArtifactMissing and ArtifactCorrupt
    for weights that cannot be read.
    """
    config = read_json(target / "config.json")
    owners: dict[str, Path] = {}
    for file in sorted(target.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as handle:
                owners |= dict.fromkeys(handle.keys(), file)
        except SafetensorError as fault:
            raise ArtifactCorrupt(f"{file} is not a readable safetensors file: {fault}", "download or copy it again"
                                  ) from fault
    if not owners:
        raise ArtifactMissing(f"no safetensors weights in {target}", "give a target with safetensors weights")
    tensors = {}
    for name in mtp_tensors(owners, config):
        with safe_open(owners[name], framework="pt") as handle:
            tensors[name] = handle.get_tensor(name)
    write_directory(out, dict(config) | {"eyrie": {"drafter": MARK}}, tensors)
