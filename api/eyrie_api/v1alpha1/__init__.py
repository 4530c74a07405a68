"""The contract, version v1alpha1: what a user asks, what a stage is told, what everyone reports.

Frozen, closed pydantic models and nothing else: this package imports pydantic alone, so that a notebook, a pod and
a control plane can all speak it without loading one another. `job` is what the user writes, `status` what we answer,
`stages` what passes between the control plane and a stage program, `reports` what was measured, `plan` what it will
cost. Layer ids everywhere are indices into Hugging Face `hidden_states` (0 = embeddings, i = output of layer i - 1).
"""
