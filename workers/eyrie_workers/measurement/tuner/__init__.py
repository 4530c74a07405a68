"""The choice of depth, top-k and draft tokens by load: replay, prediction, race, operating map."""
