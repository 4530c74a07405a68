"""HTTP routes, by subject. Each handler parses, calls one verb of the control plane, and renders; no logic."""
