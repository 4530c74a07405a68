"""The target's own answers to the training prompts, generated in process or through an endpoint (`stages.regenerate`).
"""
