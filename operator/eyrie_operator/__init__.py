"""What drives a job to its end, with a cluster or without: a pure reconcile and the two worlds that obey it."""
