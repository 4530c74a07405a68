"""In what order the stages run: one kfp definition, two runners."""
