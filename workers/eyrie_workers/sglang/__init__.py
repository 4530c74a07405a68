"""SGLang as the serving engine: command lines, process, and the model classes it loads from this package."""
