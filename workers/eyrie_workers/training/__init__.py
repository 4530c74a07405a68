"""How a drafter is trained: packing, the unroll, the loss, the loop, its resumable state, and its evaluation."""
