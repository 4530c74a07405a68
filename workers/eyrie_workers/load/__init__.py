"""The load generator: many users at once against any OpenAI-compatible server, several servers compared fairly."""
