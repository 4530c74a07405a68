"""What the two seeds claim, measured here: one file per claim, one command, one plot, one sentence.

`python -m eyrie_workers.experiments.<name> [--short] --out DIR`; all of them: `python -m eyrie_workers.experiments`.
"""
