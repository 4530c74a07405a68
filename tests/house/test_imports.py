"""Imports between our files: no cycles, and no module of the wheel that nothing in the product reaches."""

from collections.abc import Iterable, Mapping

from tests.house.sources import dotted, imports, modules, programs

ENTRY_POINTS = {
    "eyrie_operator.command": "the console script `eyrie`",
    "eyrie_operator.manifests.crd": "`python -m` writes the custom resource definitions into the chart",
    "eyrie_workers.drafters.export": "`python -m` converts drafters to and from speculators format",
    "eyrie_workers.sglang.plugin.olmo2": "SGLang imports every module of that package",
    "eyrie_workers.sglang.plugin.qwen2_moe": "SGLang imports every module of that package",
    "eyrie_workers.sglang.plugin.capture_export": "SGLang imports every module of that package",
}
ENTRY_PACKAGES = {
    "eyrie_workers.stages": "stage programs, started by the names in the catalog",
    "eyrie_api.database.migrations": "Alembic loads them from their directory",
}


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name):]
            del stack[stack.index(name):]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_a_cycle_is_found() -> None:
    assert cycles({"a": "b", "b": "c", "c": "a", "d": "a"}) == [["a", "b", "c"]]
    assert cycles({"a": "bc", "b": "c", "c": ""}) == []


def test_no_files_import_each_other_in_a_cycle() -> None:
    assert cycles(imports()) == []


def test_every_module_of_the_wheel_is_reached_from_an_entry_point_of_the_product() -> None:
    product = {dotted(path) for path in modules()}
    assert product >= ENTRY_POINTS.keys()
    reached: set[str] = set()
    waiting = [name for name in product if name in ENTRY_POINTS or name.rpartition(".")[2] == "__main__"
               or any(f"{name}.".startswith(f"{package}.") for package in ENTRY_PACKAGES)]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(imports()[name] | programs()[name])
    # Importing a module imports the packages that contain it.
    packages = {name.rsplit(".", depth)[0] for name in reached for depth in range(1, name.count(".") + 1)}
    assert sorted(product - reached - packages) == []
