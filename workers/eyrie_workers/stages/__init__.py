"""One program per stage: `python -m eyrie_workers.stages.<stage> --spec spec.json --out manifest.json`."""
