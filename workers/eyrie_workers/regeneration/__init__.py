"""The target answers the training prompts again, in process or through an endpoint. The program is
`stages.regenerate`."""
