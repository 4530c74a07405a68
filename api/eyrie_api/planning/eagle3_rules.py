"""The rules of an EAGLE-3 drafter's config.json and of the names, shapes and dtypes of its tensors. Pure.

SGLang reports few errors. A missing key becomes transformers' default for Llama (32 layers, vocabulary 32000, rotary
base 10000); an unknown flag is ignored; a key in the wrong place is not read; unknown tensors are skipped, missing ones
stay at their initial values, and the drafter is then served with an acceptance near zero. All findings are returned at
once, each with a hint. The format is described in `eyrie_workers.drafters.eagle3.directory`, which adds the rules over
values, card and digests.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eyrie_api.contract.families import FAMILIES, DecoderSizes
from eyrie_api.planning.drafter_rules import (
    DTYPES,
    LAYER_IDS,
    Finding,
    Header,
    Target,
    decoder_rules,
    decoder_sizes,
    error,
    foreign_architecture,
    kind_rules,
    vocabulary_rules,
    warning,
)
from eyrie_api.planning.sglang_support import SGLANG_VERSION, SUPPORTED_BY_SGLANG, captured_inputs
from eyrie_api.planning.target_config import DEFAULT_ROPE_THETA

ARCHITECTURE = FAMILIES["eagle3"].architecture

MAPS = ("d2t", "t2d")
"""Tensors that are not parameters."""

_OLD_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True)
class Shape(DecoderSizes):
    """The sizes and flags of a config.json that determine the tensors."""

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    fc_norm: bool
    norm_before_fc: bool
    fc_bias: bool


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def num_aux(config: Mapping[str, Any]) -> int:
    """Number of aux layers as SGLang reads it: the count, else the length of the nested ids, else 3."""
    count = config.get("num_aux_hidden_states")
    if isinstance(count, int):
        return count
    return len(nested(config).get(LAYER_IDS) or ()) or 3


def aux_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The `hidden_states` indices that a drafter reads."""
    top = config.get(LAYER_IDS)
    return tuple(top) if top is not None else captured_inputs("", nested(config)[LAYER_IDS])


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a config. Its keys must be present (`key_rules` checks that)."""
    draft_vocab = config.get("draft_vocab_size")
    return Shape(
        **decoder_sizes(config), target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["vocab_size"] if draft_vocab is None else draft_vocab, num_aux=num_aux(config),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        norm_before_fc=bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_bias=bool(config.get("bias", False)))


def canonical_name(name: str) -> str:
    """The name Eyrie writes for a tensor, from any spelling SGLang accepts."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def expected_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint."""
    hidden, inner, draft = shape.hidden_size, shape.intermediate_size, shape.draft_vocab_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, shape.num_aux * shape.target_hidden_size), "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden)}
    for number in range(shape.num_layers):
        prefix = "midlayer." if number == 0 else f"layers.{number}."
        width = 2 * hidden if number == 0 else hidden  # the first layer reads an embedding beside the state
        shapes |= {prefix + name: size for name, size in (
            ("input_layernorm.weight", (hidden,)), ("hidden_norm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("self_attn.q_proj.weight", (q, width)), ("self_attn.k_proj.weight", (kv, width)),
            ("self_attn.v_proj.weight", (kv, width)), ("self_attn.o_proj.weight", (hidden, q)),
            ("mlp.gate_proj.weight", (inner, hidden)), ("mlp.up_proj.weight", (inner, hidden)),
            ("mlp.down_proj.weight", (hidden, inner)))}
    if draft != shape.vocab_size:
        shapes |= {"d2t": (draft,), "t2d": (shape.vocab_size,)}
    if shape.norm_before_fc:
        shapes["input_norm.weight"] = (shape.num_aux * shape.target_hidden_size,)
    if shape.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (shape.target_hidden_size,) for index in range(shape.num_aux)}
    if shape.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if shape.target_hidden_size != hidden:
        shapes["embed_tokens.weight"] = (shape.vocab_size, hidden)
    return shapes


# Defaults of transformers' LlamaConfig for missing keys.
_SILENT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}
_COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "max_position_embeddings", "target_hidden_size", "num_aux_hidden_states")
_MOST = {"num_hidden_layers": 64, "num_aux_hidden_states": 128}
_EAGLE_1_2 = frozenset({
    "LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle",
    "EagleLlamaForCausalLM", "EagleDeepSeekMTPModel", "EagleModel"})
_COMPUTED_ROPES = ("default", "linear", "llama3")


def architecture_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The architecture is EAGLE-3's for SGLang. After an error here the other rules do not apply."""
    architectures = config.get("architectures")
    names = list(architectures) if isinstance(architectures, list) else []
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
    elif reason := foreign_architecture(config):
        yield error("architecture-unknown", *reason)
    elif names != [ARCHITECTURE]:
        yield error("architecture-unknown", f"architectures is {architectures!r}, which no family of Eyrie has",
                    "give a drafter of a family Eyrie trains; others cannot be checked")


def joins_one_state(config: Mapping[str, Any], fc: Header) -> bool:
    """Whether `fc` is of an EAGLE-1/2 drafter, which joins one state with one embedding. Two aux states of EAGLE-3 are
    as wide; its config has a draft vocabulary, also where the weights do not show the shape."""
    joined = fc.shape is None or (len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0])
    return joined and "draft_vocab_size" not in config


def author_format_rules(config: Mapping[str, Any], tensors: Mapping[str, Header]) -> Iterator[Finding]:
    """EAGLE drafters under the architecture name of their target, as the authors' code writes them."""
    fc = tensors.get("fc.weight")
    if config.get("architectures") != ["LlamaForCausalLM"] or fc is None:
        return
    what = "architectures is ['LlamaForCausalLM'], which has no fc.weight: SGLang would serve it as a language model"
    if joins_one_state(config, fc):
        yield error("architecture-name", f"{what}. It is an EAGLE-1/2 drafter in its authors' form",
                    "export it with `python -m eyrie_workers.drafters.export --to sglang DIR OUT`")
    else:
        yield error("architecture-name", f"{what}. It is an EAGLE-3 drafter", f"write [{ARCHITECTURE!r}]")


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
        if ids is None:
            continue
        integers = isinstance(ids, list) and ids and not any(isinstance(i, bool) or not isinstance(i, int) for i in ids)
        problem = "not a list of integers" if not integers else (
            None if all(a < b for a, b in pairwise(ids)) else "not ascending")
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
    """Rotary embedding: given several times with the same values, once, or not at all: the base is then 10000, for the
    trainers of published drafters, SGLang and `targets.config` alike."""
    parts = [part for key in ("rope_parameters", "rope_scaling") if (part := config.get(key))]
    thetas = {float(value) for value in (config.get("rope_theta"), *(part.get("rope_theta") for part in parts))
              if value}
    if len(thetas) > 1:
        yield error("rope-disagrees", f"rope_theta is given as {sorted(thetas)}", "write one value everywhere")
    kinds = {str(part.get("rope_type") or part.get("type") or "default") for part in parts}
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


# Prefixes of tensors that exist only when a flag is set: a finding then names the flag.
_FLAGS = {"fc_norm.": "fc_norm", "input_norm.": "norm_before_fc", "fc.bias": "bias"}


def tensor_rules(shape: Shape, shares_head: bool, stored: Mapping[str, Header]) -> Iterator[Finding]:
    """Rules for names, shapes and dtypes. `shares_head`: draft_vocab_size is null, lm_head is the target's."""
    counted = Counter(canonical_name(name) for name in stored)
    for name, times in sorted(counted.items()):
        if times > 1:
            yield error("tensor-twice", f"{name} is stored {times} times under different spellings",
                        "keep the one that was trained")
    if any(name.startswith("model.") for name in stored):
        yield warning("tensor-prefix", "tensor names begin with 'model.': SGLang reads them, vLLM does not",
                      "write the names without it")
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
    shapes = expected_shapes(shape)
    if shares_head:
        shapes.pop("lm_head.weight")
    yield from _name_rules(shape, shapes, tensors)
    for name in sorted(set(shapes) & set(tensors)):
        if (actual := tensors[name].shape) is not None and actual != shapes[name]:
            yield error("tensor-shape", f"{name} has shape {list(actual)}, config.json implies "
                        f"{list(shapes[name])}", "config.json and weights belong to different drafters: export again")
    for name, wanted in (("d2t", "int64"), ("t2d", "bool")):
        if name in tensors and tensors[name].dtype not in (None, wanted):
            yield error("map-dtype", f"{name} is {tensors[name].dtype}, not {wanted}", f"store {name} as {wanted}")
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in MAPS and tensor.dtype is not None}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        yield error("tensor-dtype", f"parameters are stored as {', '.join(sorted(dtypes))}",
                    f"store all of them as one of {', '.join(DTYPES)}")


def _name_rules(shape: Shape, shapes: Mapping[str, tuple[int, ...]],
                tensors: Mapping[str, Header]) -> Iterator[Finding]:
    """Missing and unknown names. Names with a more specific finding are reported there and removed from the sets."""
    missing, unknown = set(shapes) - set(tensors), set(tensors) - set(shapes)
    # 1. Tensors of a flag.
    for prefix, flag in _FLAGS.items():
        extra = sorted(name for name in unknown if name.startswith(prefix))
        if extra:
            unknown -= set(extra)
            yield error("flag-missing", f"{', '.join(extra)} are there but {flag} is not set: SGLang would skip them",
                        f"write {flag} true, as it was trained")
        lacking = sorted(name for name in missing if name.startswith(prefix))
        if lacking:
            missing -= set(lacking)
            yield error("flag-without-tensors", f"{flag} is set but {', '.join(lacking)} are missing: SGLang would "
                        "leave them as initialised", f"write {flag} false if it was trained without, else export again")
    # 2. The maps between the vocabularies.
    if "t2d" in missing and "d2t" in tensors:
        missing.remove("t2d")
        yield warning("t2d-missing", "t2d is missing: SGLang and vLLM do not read it, trainers do",
                      "store it with d2t")
    if "d2t" in missing:
        missing -= set(MAPS)
        yield error("d2t-missing", f"d2t is missing for a draft vocabulary of {shape.draft_vocab_size} in "
                    f"{shape.vocab_size}: draft ids would be used as target ids", "export the drafter again")
    if shape.draft_vocab_size == shape.vocab_size:
        if "d2t" in unknown:
            yield warning("maps-needless", "d2t is stored although the draft vocabulary is the target's: vLLM "
                          "refuses to load it", "leave d2t and t2d out")
        unknown -= set(MAPS)
    # 3. The norm that further layers have under two names.
    for number in range(1, shape.num_layers):
        norm, other = f"layers.{number}.hidden_norm.weight", f"layers.{number}.input_layernorm.weight"
        if norm in missing and other in tensors:
            missing.remove(norm)
            yield error("layer-norm-name", f"layer {number} has input_layernorm but no hidden_norm, which is the norm "
                        "SGLang applies there", f"store a copy of {other} as {norm}")
        elif other in missing and norm in tensors:
            missing.remove(other)
            yield warning("layer-norm-vllm", f"layer {number} has hidden_norm but no input_layernorm, which is the "
                          "norm vLLM applies there", f"store a copy of {norm} as {other}")
    # 4. All others.
    if "embed_tokens.weight" in unknown:
        unknown.remove("embed_tokens.weight")
        yield warning("embedding-ignored", "embed_tokens.weight is stored: SGLang drafts with the target's embedding, "
                      "and a hot swap of these weights would write this one into the target",
                      "leave it out, unless hidden_size differs from the target's")
    if missing:
        yield error("tensor-missing", f"tensors are missing: {', '.join(sorted(missing))}: SGLang would leave them at "
                    "random", "export the drafter again")
    if unknown:
        yield error("tensor-unknown", f"unknown tensors: {', '.join(sorted(unknown))}: SGLang would skip them",
                    "export the drafter again, or set the flag in config.json that asks for them")


def target_shape_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Sizes must equal the target's, and the rotary embedding as far as positions come from it."""
    text = target.text
    yield from vocabulary_rules(config, target)
    width = config.get("target_hidden_size", config["hidden_size"])
    if width != text.get("hidden_size"):
        yield error("hidden-size-differs", f"the drafter reads states of {width}, the target's are "
                    f"{text.get('hidden_size')}", "serve the drafter with the target it was trained for")
    if target.architecture is not None and target.architecture not in SUPPORTED_BY_SGLANG:
        yield error("target-not-captured", f"SGLang {SGLANG_VERSION} cannot capture hidden states of "
                    f"{target.architecture}", "serve it with Eyrie's own engine, or use a supported target")
    # The drafter has keys of its own, so another rotary base only gets a warning; M-RoPE sections must agree.
    own, target_rope = _rope(config), _rope(target.text)
    if own.get("mrope_section") != target_rope.get("mrope_section"):
        yield error("rope-sections", f"mrope_section is {own.get('mrope_section')}, the target's "
                    f"{target_rope.get('mrope_section')}: positions come from the target in its form",
                    "export the drafter with the target's rope")
    for key, default in (("rope_theta", DEFAULT_ROPE_THETA), ("rope_type", "default"), ("factor", 1.0)):
        if own.get(key, default) != target_rope.get(key, default):
            yield warning("rope-differs", f"the drafter's {key} is {own.get(key, default)}, the target's "
                          f"{target_rope.get(key, default)}", "confirm that it was trained with this value")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    rope = dict(settings) if isinstance(settings, Mapping) else {}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta")
    return rope | ({"rope_theta": float(theta)} if isinstance(theta, int | float) else {})


def unreadable(config: Mapping[str, Any]) -> list[Finding]:
    """Errors after which the other rules do not apply."""
    return [*architecture_rules(config)] or [*kind_rules(config)]


def is_sized(config: Mapping[str, Any]) -> bool:
    """Whether the config determines the shapes of the tensors."""
    return not any(finding.severity == "error" for finding in key_rules(config))


def rules(config: Mapping[str, Any], tensors: Mapping[str, Header] | None, target: Target | None,
          architecture: str | None = None, num_layers: int | None = None) -> Iterator[Finding]:
    """All findings.

    tensors                    by their names in the files; None: unknown
    architecture, num_layers   of the target, where `target` is None and they are known
    """
    if faults := unreadable(config):
        yield from faults
        return
    yield from key_rules(config)
    yield from flag_rules(config)
    yield from norm_rules(config)
    if target is not None:
        architecture, num_layers = target.architecture, target.num_layers
    yield from layer_rules(config, architecture, num_layers)
    yield from window_rules(config)
    yield from rope_rules(config)
    if not is_sized(config):
        return
    yield from size_rules(config)
    if tensors is not None:
        yield from tensor_rules(shape_of(config), config.get("draft_vocab_size") is None, tensors)
    if target is not None:
        yield from target_shape_rules(config, target)


def own_engine_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What SGLang computes and Eyrie's own engine does not, as errors. The config has no others."""
    shape = shape_of(config)
    if (shape.num_layers != 1 or shape.target_hidden_size != shape.hidden_size or shape.fc_bias
            or config.get("draft_vocab_size") is None):
        yield error("reference-engine", "Eyrie's engine computes drafters of one layer, of their target's hidden size, "
                    "without bias and with an output matrix of their own", "serve and measure this one in SGLang")
    yield from decoder_rules(config)
