"""Model classes that SGLang loads from here: `SGLANG_EXTERNAL_MODEL_PACKAGE=eyrie_workers.sglang.plugin`, and a
launcher of SGLang (`guarded`). `prefix_cache` is a plugin of SGLang.

The only modules of Eyrie that import sglang. They import no other module of Eyrie, so a serving image needs only this
package and its parent packages.
"""
