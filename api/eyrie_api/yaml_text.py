"""YAML as people and other programs write it: `load`.

PyYAML reads YAML 1.1, in which 5e-4 and Helm's 1e+06 are texts; here they are numbers, as in YAML 1.2 and JSON. A key
that is given twice is an error: the second value would replace the first silently.
"""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """A copy of SafeLoader's resolvers is made by the first `add_implicit_resolver`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node. Raises ConstructorError naming the key and its line."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"),
                              list("-+0123456789"))


def load(text: str) -> Any:
    """The one document of a text. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
