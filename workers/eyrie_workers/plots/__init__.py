"""Figures of a job, drawn from its manifests and metric series: PNG for a glance, SVG for a paper."""
