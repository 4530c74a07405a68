"""One bench for all drafter families: which of them, if any, is right for a user's own target."""
