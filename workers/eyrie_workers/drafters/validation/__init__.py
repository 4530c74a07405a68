"""Rules a drafter directory has to keep: configuration, tensors, target."""
