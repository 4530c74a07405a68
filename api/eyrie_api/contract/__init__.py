"""The contract, version v1alpha1: what a user requests, what a stage receives, what every component reports.

Frozen, closed pydantic models and nothing else: this package imports pydantic alone, so that a notebook, a pod and a
control plane can all use it without loading one another. `job` is the user's request, put together from one module per
section; `status` is the answer; `stages` passes between the control plane and a stage program; `reports` holds what was
measured; `plan` estimates cost. Layer ids are indices into Hugging Face `hidden_states` (0 = embeddings, i = output of
layer i - 1).
"""
