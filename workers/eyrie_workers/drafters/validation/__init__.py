"""Validation of drafter directories: findings, validators, and the rules that hold for every family."""
