"""The frozen target: reading it from disk, running it, its layers, its chat template."""
