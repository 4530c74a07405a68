"""Published claims, measured here: one module, command, plot and page per claim.

`python -m benchmarks.experiments.<name> [--short] --out DIR`; all of them: `python -m
benchmarks.experiments`.
"""
