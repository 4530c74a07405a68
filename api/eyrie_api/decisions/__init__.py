"""Pure decisions: plan, sweep, drafter families, leaderboard, promotion. Values in, values out."""
