"""Print, as JSON, how the installed SGLang captures hidden states, found without importing it. Run by its Python.

Per entry class of `srt/models` that has or inherits `set_eagle3_layers_to_capture` and `get_embed_and_head`: whether
explicit layer ids are taken raw unless the first is 1; and which of all have `set_dflash_layers_to_capture`. Classes
are followed through their bases by name, over imports between model modules. Also the methods of quantisation that
`srt/layers/quantization` registers for any device.
"""

import ast
import importlib.util
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

HOOK, BLOCK_HOOK = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
SHARED = "get_embed_and_head"


class Models:
    """The model modules, parsed."""

    def __init__(self, root: Path) -> None:
        self.classes: dict[tuple[str, str], ast.ClassDef] = {}
        self.imported: dict[tuple[str, str], tuple[str, str]] = {}
        self.entries: list[tuple[str, str]] = []
        for file in sorted(root.glob("*.py")):
            self._read(file.stem, ast.parse(file.read_text()))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt.models."):
                for name in node.names:
                    self.imported[module, name.asname or name.name] = (str(node.module).rsplit(".", 1)[1], name.name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[module, node.name] = node
            elif isinstance(node, ast.Assign) and any(
                    isinstance(name, ast.Name) and name.id == "EntryClass" for name in node.targets):
                listed = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                self.entries += [(module, name.id) for name in listed if isinstance(name, ast.Name)]

    def hook(self, module: str, name: str, method: str = HOOK) -> ast.FunctionDef | None:
        """The method of a class or of the first base that has it."""
        while (module, name) in self.imported and (module, name) not in self.classes:
            module, name = self.imported[module, name]
        found = self.classes.get((module, name))
        if found is None:
            return None
        for node in found.body:
            if isinstance(node, ast.FunctionDef) and node.name == method:
                return node
        inherited = (self.hook(module, ast.unparse(base), method) for base in found.bases
                     if ast.unparse(base) != name)  # a class that replaces its namesake of another module
        return next((hook for hook in inherited if hook is not None), None)


def main() -> None:
    """Scan the wheel this interpreter would import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("sglang is not installed here")
    source = Path(spec.submodule_search_locations[0]) / "srt"
    models = Models(source / "models")
    hooks = {name: hook for module, name in models.entries if (hook := models.hook(module, name)) is not None
             and models.hook(module, name, SHARED) is not None}
    blocks = [name for module, name in models.entries if models.hook(module, name, BLOCK_HOOK) is not None]
    raw = {name: "layer_ids[0] == 1" in ast.unparse(hook) for name, hook in hooks.items()}
    registered = re.findall(r'^ +"([\w-]+)": \w+Config,', (
        source / "layers" / "quantization" / "__init__.py").read_text(), re.MULTILINE)
    json.dump({"quantised": registered, "version": version("sglang"), "entries": len(models.entries),
               "blocks": blocks, "raw_unless_first_is_one": raw}, sys.stdout)


if __name__ == "__main__":
    main()
