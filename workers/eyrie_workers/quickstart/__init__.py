"""Data of the quickstart target: its model directory, benchmark suites and conversations. `tests/benchmarks/quickstart`
holds the programs that created them."""
