"""SGLang as the serving engine: its launch lines, its process, and what has to be added to it."""
