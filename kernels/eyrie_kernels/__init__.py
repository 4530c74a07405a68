"""Triton kernels of the few inner loops worth one: each file holds formulas, reference, kernels and gradient."""
