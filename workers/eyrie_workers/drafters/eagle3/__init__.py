"""EAGLE-3: model, objective, unroll, serving, checkpoint, initialisation from the target (arXiv:2503.01840)."""
