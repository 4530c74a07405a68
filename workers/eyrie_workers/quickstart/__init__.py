"""Data of the quickstart target: its model directory, benchmark suites and conversations. `benchmarks/quickstart`
holds the programs that created them."""
