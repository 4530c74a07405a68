"""What single commands of `eyrie` do: the demo, a background control plane, the check of a drafter."""
