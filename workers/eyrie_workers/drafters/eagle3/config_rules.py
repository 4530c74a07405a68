"""Rules for the `config.json` of an EAGLE-3 drafter: whether SGLang builds from it the drafter that was trained.

SGLang reports few errors. A missing key becomes transformers' default for Llama (32 layers, vocabulary 32000, rotary
base 10000); an unknown flag is ignored; a key in the wrong place is not read. A missing key is therefore treated like a
wrong value wherever the default cannot be right.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from eyrie_api.decisions.sglang_support import captured_inputs
from eyrie_workers.drafters.checkpoint.file_format import DTYPES
from eyrie_workers.drafters.eagle3.directory_format import ARCHITECTURE, LAYER_IDS, nested, num_aux
from eyrie_workers.drafters.validation.finding import Finding, error, warning

# Defaults of transformers' LlamaConfig for missing keys.
_SILENT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}
_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "max_position_embeddings", "target_hidden_size", "num_aux_hidden_states")
_MOST = {"num_hidden_layers": 64, "num_aux_hidden_states": 128}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("eagle_config", "rope_parameters", "rope_scaling"), ((dict,), "an object")),
    **dict.fromkeys(("layer_types", LAYER_IDS), ((list,), "a list")),
    **dict.fromkeys((
        "fc_norm", "norm_before_fc", "use_aux_norm", "norm_output", "bias", "attention_bias", "mlp_bias",
        "norm_before_residual", "tie_word_embeddings"), ((bool,), "true or false")),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), ((int, float), "a number")),
}
_EAGLE_1_2 = frozenset({
    "LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle",
    "EagleLlamaForCausalLM", "EagleDeepSeekMTPModel", "EagleModel"})
_COMPUTED_ROPES = ("default", "linear", "llama3")


def architecture_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The architecture is EAGLE-3's for SGLang. After an error here the other rules do not apply."""
    found = config.get("architectures")
    names = list(found) if isinstance(found, list) else []
    if "speculators_model_type" in config or "Eagle3Speculator" in names:
        yield error("speculators-format", "this is a directory in speculators format, which SGLang does not read",
                    "export it with `python -m eyrie_workers.drafters.export --to sglang DIR OUT`; vLLM serves it as "
                    "it is")
    elif _EAGLE_1_2 & set(names):
        yield error("eagle-1-2", f"architecture {names[0]} is an EAGLE-1/2 drafter, not of EAGLE-3",
                    "an EAGLE-1/2 drafter of Llama layers is LlamaForCausalLMEagle; serve others by hand with "
                    "--speculative-algorithm EAGLE")
    elif names == ["Eagle3LlamaForCausalLM"]:
        yield error("architecture-name", f"architectures is {names}: SGLang has no drafter of that name",
                    f"write [{ARCHITECTURE!r}]; vLLM knows it too")
    elif names != [ARCHITECTURE]:
        yield error("architecture-unknown", f"architectures is {found!r}, which no family of Eyrie has",
                    "give a drafter of a family Eyrie trains; others cannot be checked")


def author_format_rules(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """EAGLE drafters under the architecture name of their target, as the authors' code writes them."""
    fc = tensors.get("fc.weight")
    if config.get("architectures") != ["LlamaForCausalLM"] or fc is None:
        return
    what = "architectures is ['LlamaForCausalLM'], which has no fc.weight: SGLang would serve it as a language model"
    if fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]:
        yield error("architecture-name", f"{what}. It is an EAGLE-1/2 drafter in its authors' form",
                    "export it with `python -m eyrie_workers.drafters.export --to sglang DIR OUT`")
    else:
        yield error("architecture-name", f"{what}. It is an EAGLE-3 drafter", f"write [{ARCHITECTURE!r}]")


def kind_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Types of the values. After an error here the other rules cannot read the config."""
    inner = config.get("eagle_config")
    objects = [("", config), *([("eagle_config.", inner)] if isinstance(inner, dict) else [])]
    for prefix, section in objects:
        for key, (kinds, expected) in _KINDS.items():
            value = section.get(key)
            if value is not None and (not isinstance(value, kinds) or (bool not in kinds and value is True)):
                yield error("key-kind", f"{prefix}{key} is {value!r}, not {expected}",
                            f"write {expected}, or leave it out")
    for key in ("rope_parameters", "rope_scaling"):
        theta = (config.get(key) or {}).get("rope_theta") if isinstance(config.get(key), dict) else None
        if theta is not None and not isinstance(theta, int | float):
            yield error("key-kind", f"{key}.rope_theta is {theta!r}, not a number", "write the base")


def key_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Required keys and counts. After an error here the tensor shapes are unknown."""
    for key, default in _SILENT_DEFAULTS.items():
        if config.get(key) is None:
            yield error("key-missing", f"{key} is missing: SGLang would take Llama's default, {default}",
                        f"write the {key} the drafter was trained with")
    for key in _COUNTS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield error("key-not-a-count", f"{key} is {value!r}, not a positive integer", f"write the number of {key}")
    for key, most in _MOST.items():
        value = config.get(key)
        if isinstance(value, int) and value > most:
            yield error("key-not-a-count", f"{key} is {value}, and no drafter has more than {most}",
                        f"write the drafter's {key}, not the target's")
    if "draft_vocab_size" not in config:
        yield error("draft-vocab-size-missing", "draft_vocab_size is missing: SGLang ends with an AttributeError",
                    "write the number of rows of lm_head.weight")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        yield error("heads-not-divisible", f"num_attention_heads {heads} is not a multiple of num_key_value_heads "
                    f"{kv_heads}", "config.json and weights belong to different drafters: export again")
    size, vocab = config.get("draft_vocab_size"), config.get("vocab_size")
    if isinstance(vocab, int) and size is not None and not (isinstance(size, int) and 0 < size <= vocab):
        yield error("draft-vocab-size", f"draft_vocab_size {size!r} is not between 1 and vocab_size {vocab}",
                    "write the number of rows of lm_head.weight; vocab_size is the target's")


def flag_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Flags that SGLang ignores, or that make it discard trained parameters."""
    if config.get("tie_word_embeddings"):
        yield error("tied", "tie_word_embeddings is true: SGLang would predict with the target's embedding and drop "
                    "the trained lm_head", "write false")
    if config.get("norm_before_residual"):
        yield error("norm-before-residual", "norm_before_residual is true: SGLang has no such flag and adds the state "
                    "before its norm to the residual stream", "train with norm_before_residual false")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield error("bias-ignored", f"{key} is true: SGLang builds the drafter's projections without bias",
                        "train without, and write false")
    if config.get("bias"):
        yield warning("bias-vllm", "bias is true: SGLang gives it to fc alone, vLLM to attention and not to fc",
                      "serve with SGLang only, or train fc without bias")
    if config.get("hidden_act", "silu") != "silu":
        yield error("activation", f"hidden_act is {config['hidden_act']!r}: the drafter's MLP is gated with silu",
                    "train with silu")
    if config.get("model_type") != "llama":
        yield error("model-type", f"model_type is {config.get('model_type')!r}, not 'llama'",
                    "write 'llama', whatever the target's family: the drafter is a Llama layer")
    if config.get("quantization_config") is not None:
        yield error("quantised-drafter", "quantization_config is set: the drafter's own weights would be quantised",
                    "export it unquantised; it is small")
    if nested(config).get("use_aux_hidden_state") is False:
        yield error("no-aux-states", "eagle_config.use_aux_hidden_state is false: the target's last state alone would "
                    "be captured", "write true")
    declared = [config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    if len(set(map(str, declared))) > 1 or any(value not in DTYPES for value in declared):
        yield error("dtype-declared", f"dtype and torch_dtype are {declared}", f"write one of {', '.join(DTYPES)}, the "
                    "same under both keys")


def norm_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The EAGLE-3.1 flags: their place in the config and valid combinations."""
    inner, top = nested(config).get("norm_before_fc"), config.get("norm_before_fc")
    if inner is not None and top is not None and bool(inner) != bool(top):
        yield error("norm-before-fc-twice", f"norm_before_fc is {top} at the top level and {inner} in eagle_config, "
                    "which engines read first", "write the value it was trained with in both places")
    per_state = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    if per_state and bool(top if inner is None else inner):
        yield error("two-norms", "fc_norm and norm_before_fc are both set: SGLang would apply one after the other",
                    "keep the one it was trained with")
    if config.get("use_aux_norm") and not config.get("fc_norm"):
        yield warning("use-aux-norm", "use_aux_norm is SGLang's old name of fc_norm, unknown to vLLM",
                      "also write fc_norm true")
    for flag in ("fc_norm", "norm_output"):
        if flag in nested(config):
            yield error("flag-misplaced", f"{flag} is in eagle_config, where no engine reads it",
                        f"write {flag} at the top level")


def layer_rules(config: Mapping[str, Any], architecture: str | None, num_layers: int | None) -> Iterator[Finding]:
    """The layer ids in both engines' conventions. `architecture` and `num_layers` are the target's, when known."""
    inner, top = nested(config).get(LAYER_IDS), config.get(LAYER_IDS)
    if inner is None:
        where = "only at the top level, which only vLLM reads" if top is not None else "missing"
        yield error("layer-ids-missing", f"{LAYER_IDS} are {where}: SGLang would capture its default layers "
                    "whatever the drafter was trained on", f"write eagle_config.{LAYER_IDS}: output-of-layer ids, "
                    "for SGLang's defaults [1, n/2-1, n-4]")
    for place, ids in (("eagle_config", inner), ("the top level", top)):
        problem = None if ids is None else _ids_problem(ids)
        if problem:
            yield error("layer-ids-malformed", f"{LAYER_IDS} in {place} are {ids!r}: {problem}",
                        "write ascending, distinct layer numbers")
            return
    if inner is None:
        return
    captured = captured_inputs(architecture or "", inner, num_layers)
    if top is None:
        yield warning("layer-ids-vllm", f"{LAYER_IDS} are missing at the top level: vLLM would take its default layers",
                      f"write {list(captured)} there")
    elif tuple(top) != captured:
        of = f"a {architecture}" if architecture else "most targets"
        yield error("layer-ids-disagree", f"eagle_config has layers {list(inner)}, which for {of} makes SGLang "
                    f"capture states {list(captured)}; the top level has {list(top)}",
                    "find out which it was trained on: the nested ids are the states minus 1 (as they are for "
                    "DeepSeek unless they begin with 1), the top-level ids the states themselves")
    if num_layers is not None:
        most = num_layers if architecture == "GptOssForCausalLM" else num_layers - 1
        beyond = [state for state in captured if not 0 <= state <= most]
        if beyond:
            yield error("layer-not-captured", f"states {beyond} of a target with {num_layers} layers are never "
                        "captured: the last layer's output is not available", f"train on states 0 to {most}")
    count = num_aux(config)
    if count != len(inner):
        yield error("aux-count", f"num_aux_hidden_states is {count}, but {len(inner)} layer ids are given",
                    "write the number of ids")
    if len(inner) == 1 and config.get("target_hidden_size", config.get("hidden_size")) == config.get("hidden_size"):
        yield error("single-aux-layer", "one aux layer: SGLang treats a state as wide as the embedding as "
                    "the drafter's own and skips fc", "train on two or more layers")


def _ids_problem(ids: Any) -> str | None:
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        return "not a list of integers"
    return None if all(a < b for a, b in pairwise(ids)) else "not ascending"


def window_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The sliding window. vLLM reads it here; SGLang has a launch flag, which the launch line sets from here."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    slides = "sliding_attention" in (kinds or ())
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 2):
        yield error("window", f"sliding_window is {window!r}, not a number of positions", "write 2 or more, or null")
    elif window is not None and not slides:
        yield error("window-kinds", f"sliding_window is {window} but layer_types lacks sliding_attention: "
                    "vLLM would attend to everything", "write layer_types ['sliding_attention'] for every layer")
    elif window is None and slides:
        yield error("window-kinds", "layer_types has sliding_attention but sliding_window is missing",
                    "write the window it was trained with")
    if kinds is not None and len(kinds) != config.get("num_hidden_layers"):
        yield error("window-kinds", f"layer_types has {len(kinds)} entries for {config.get('num_hidden_layers')} "
                    "layers", "write one per layer of the drafter")
    elif slides and kinds and len(set(kinds)) > 1:
        yield error("window-kinds", f"layer_types mixes {sorted(set(kinds))}: SGLang's draft window is one for all "
                    "layers", "train all layers with the window, or none")


def rope_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Rotary embedding: given once, or several times with the same values."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    thetas = {float(value) for value in (config.get("rope_theta"), *(part.get("rope_theta") for part in (new, old)
                                                                    if isinstance(part, Mapping))) if value}
    if not thetas:
        yield error("rope-theta-missing", "rope_theta is missing: SGLang would take 10000",
                    "write the base it was trained with")
    if len(thetas) > 1:
        yield error("rope-disagrees", f"rope_theta is given as {sorted(thetas)}", "write one value everywhere")
    kinds = {str(part.get("rope_type") or part.get("type") or "default") for part in (new, old)
             if isinstance(part, Mapping) and part}
    if len(kinds) > 1:
        yield error("rope-disagrees", f"rope_parameters and rope_scaling are of types {sorted(kinds)}",
                    "write the same in both, or rope_parameters alone")
    if kinds - set(_COMPUTED_ROPES):
        yield warning("reference-engine", f"rope type {sorted(kinds)[0]!r} is not computed by Eyrie's own engine",
                      "serve and measure it in SGLang")


def size_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Configurations that SGLang serves and Eyrie's own engine does not compute."""
    if config["num_hidden_layers"] > 1:
        yield warning("reference-engine", f"num_hidden_layers is {config['num_hidden_layers']}: Eyrie's own engine "
                      "computes drafters of one layer", "serve and measure it in SGLang")
    if config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        yield warning("reference-engine", f"target_hidden_size {config['target_hidden_size']} is not hidden_size "
                      f"{config['hidden_size']}: Eyrie's own engine shares the target's embedding",
                      "serve and measure it in SGLang")
    if config.get("draft_vocab_size") is None:
        yield warning("reference-engine", "draft_vocab_size is null: Eyrie's own engine cannot "
                      "use the target's output matrix", "serve and measure it in SGLang")
