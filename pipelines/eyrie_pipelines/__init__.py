"""The order in which stages run: one kfp pipeline, two runners."""
