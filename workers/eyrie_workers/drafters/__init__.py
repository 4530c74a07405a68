"""One file per drafter family, the protocol they share, the draft vocabulary and checkpoint formats."""
