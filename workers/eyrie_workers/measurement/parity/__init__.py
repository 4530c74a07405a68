"""Parity of the serving engine with the reference engine, round by round."""
