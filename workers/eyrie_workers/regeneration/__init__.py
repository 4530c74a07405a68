"""The target answers anew: which prompts, by which engine, into which ledger. `stages.regenerate` is the program."""
