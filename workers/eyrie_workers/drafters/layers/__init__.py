"""Layers that several drafter families share: modules, decoder layers, KV caches, proposers, heads."""
