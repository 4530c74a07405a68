"""Figures of jobs and endpoints as Vega-Lite specifications: pure functions of reports and histories, without a drawing
library.
"""
