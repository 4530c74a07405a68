"""What the two seeds claim, measured here: one file per claim, one command, one plot, one sentence.

`python -m tests.benchmarks.experiments.<name> [--short] --out DIR`; all of them: `python -m
tests.benchmarks.experiments`.
"""
