"""What everyone agrees on (the contract, errors, artifacts) and the control plane that guards it."""
