"""The choice of num_steps, top_k and num_draft_tokens by load: profile, prediction, race, operating map."""
