"""Model classes that SGLang loads from here: `SGLANG_EXTERNAL_MODEL_PACKAGE=eyrie_workers.engines.sglang.plugin`.

The only modules of Eyrie that import sglang, and they import nothing of Eyrie: in a serving image this package and the
empty ones around it are enough.
"""
