"""The quickstart target: a small chat model shipped with Eyrie; its corpus, suites and training."""
