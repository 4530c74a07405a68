"""The driver of jobs: observation, decision and report. Independent of the runtime that executes a run."""
