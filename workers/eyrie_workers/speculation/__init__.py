"""Draft trees, lossless verification and the reference decode engine in plain PyTorch."""
