"""Triton kernels for a few inner loops. Each file contains formulas, reference, kernels and gradient."""
