"""Figures of a job as Vega-Lite specifications: pure functions of its reports, without a drawing library."""
