"""A checkpoint against the same engine without a drafter: timed units and blocks, losslessness, reports, plots."""
