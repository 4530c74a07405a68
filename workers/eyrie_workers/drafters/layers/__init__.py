"""Layers that several drafter families are made of, and how the engine drives them."""
