"""Rules on a drafter's directory that config.json and the headers of tensors decide: they return findings. Pure.

Submission applies them (`planning.published_drafters`), and so do the workers, when they write, load, adopt or check a
drafter (`eyrie_workers.drafters`). What needs values of tensors, digests or the card is checked there alone. EAGLE-3
has rules of its own (`planning.eagle3_rules`); those of the other families are what their loaders require.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from eyrie_api.contract.drafter import MarkovHeadKind
from eyrie_api.contract.families import FAMILIES
from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning import target_files
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.sglang_support import MTP_LAYER
from eyrie_api.planning.target_config import FULL, biases, check_drafter_config, has_tied_embeddings, layer_types

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a drafter's parameters."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """An error is what SGLang refuses, or loads wrongly without a message. A warning does not stop serving."""

    severity: Severity
    code: str
    """Identifier of the rule; stable, for programs and tests."""

    what: str
    hint: str


def error(code: str, what: str, hint: str) -> Finding:
    return Finding("error", code, what, hint)


def warning(code: str, what: str, hint: str) -> Finding:
    return Finding("warning", code, what, hint)


@dataclass(frozen=True)
class Header:
    """Dtype, as torch names it, and shape of a stored tensor. None: the file says its name alone."""

    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Target:
    """The `config.json` of a target directory."""

    path: Path
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    @property
    def architecture(self) -> str | None:
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    @property
    def num_layers(self) -> int | None:
        count = self.text.get("num_hidden_layers")
        return count if isinstance(count, int) else None


def vocabulary_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    if config.get("vocab_size") != target.text.get("vocab_size"):
        yield error("vocab-differs", f"vocab_size is {config.get('vocab_size')}, the target's "
                    f"{target.text.get('vocab_size')}", "serve the drafter with the target it was trained for")


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Config key of the aux layer ids; nested in `eagle_config` for SGLang, at the top level for vLLM."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("eagle_config", "rope_parameters", "rope_scaling"), ((dict,), "an object")),
    **dict.fromkeys(("layer_types", LAYER_IDS), ((list,), "a list")),
    **dict.fromkeys((
        "fc_norm", "norm_before_fc", "use_aux_norm", "norm_output", "bias", "attention_bias", "mlp_bias",
        "norm_before_residual", "tie_word_embeddings"), ((bool,), "true or false")),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), ((int, float), "a number")),
}


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


_SERVED_BY = {
    "DFlashLagunaForCausalLM": ("a DFlash drafter of Laguna, whose gates", "DFLASH"),
    "Eagle3DeepseekV2ForCausalLM": ("an EAGLE-3 drafter with MLA, whose attention", "EAGLE3"),
}
"""Architectures of drafters that SGLang 0.5.23 serves and Eyrie does not compute: what they are, and the algorithm."""

DFLASH2, LILICORR = FAMILIES["dflash"].read_architectures


def foreign_architecture(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """What drafter of another kind the config is of, and where it is served; None: not known as one."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if name not in _SERVED_BY:
        return None
    what, algorithm = _SERVED_BY[name]
    return (f"it is {what} Eyrie does not compute",
            f"serve it by hand in SGLang with --speculative-algorithm {algorithm}")


# --- the other families ----------------------------------------------------------------------------------------------


def decoder_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Decoder layers that Eyrie does not compute."""
    try:
        check_drafter_config(config)
    except UnsupportedTarget as fault:
        yield error("contract", fault.message, fault.hint)


_COMPUTED_BY_SGLANG: dict[str, dict[str, Any]] = {
    "eagle1": {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False},
    "mtp": {"model_type": "qwen2", "num_nextn_predict_layers": 1}}
"""Values in the config of an EAGLE-1/2 drafter and of a target's MTP layer, as SGLang's classes `LlamaForCausalLMEagle`
and `MiMoMTP` compute them, where the config names them."""


def one_layer_rules(family: str, hint: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """The config of a family of `_COMPUTED_BY_SGLANG`."""
    for name, value in {"architectures": [FAMILIES[family].architecture], **_COMPUTED_BY_SGLANG[family]}.items():
        if config.get(name, value) != value:
            yield error("contract", f"{name} is {config[name]!r}, not {value!r}", hint)
    if family == "eagle1" and config.get("hot_vocab_size") not in (None, config["vocab_size"]):
        yield error("contract", f"hot_vocab_size is {config['hot_vocab_size']!r}: a reduced output matrix is not "
                    "supported", hint)
    if (window := layer_types(config)[1]) is not None:
        yield error("contract", f"sliding_window is {window}: not what SGLang computes for this class", hint)


def standalone_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    family, hint = config.get("model_type"), "serve this one in SGLang, or train one"
    if family != "llama" or has_tied_embeddings(config) or layer_types(config)[1] is not None:
        yield error("contract", f"it is a {family} that Eyrie did not write: a standalone drafter is a Llama with its "
                    "own output matrix and without a window", hint)
    elif any(biases(config)):
        yield error("contract", "its layers have biases: a standalone drafter has none", hint)


def block_rules(config: Mapping[str, Any], least_block: int) -> Iterator[Finding]:
    """The config of a DFlash drafter, or of a DSpark one but for its head; the first fault.

    least_block   positions of the smallest block: one that proposes, and in DFlash the settled token's
    """
    again, own = "export the drafter again", config.get("dflash_config")
    if config.get("model_type") != "qwen3" or biases(config)[0] or set(layer_types(config)[0]) != {FULL}:
        yield error("contract", "its layers are not Qwen3's with full attention and without bias",
                    "serve this one in SGLang")
        return
    if not isinstance(own, Mapping):
        yield error("contract", f"dflash_config is {own!r}, not an object", again)
        return
    known, architectures = {"block_size", "mask_token_id", "num_target_layers", "target_layer_ids"}, config.get(
        "architectures")
    for is_there, keys, fault_of in (
            (architectures == [DFLASH2], set(own) & {*_SELECTOR_KEYS, "output_multiplier", "final_logit_softcapping"},
             _selector_fault),
            (architectures == [LILICORR], {*LILICORR_KEYS} | set(own) & {*_CONVOLUTION_KEYS}, _lilicorr_fault),
            (own.get("projector_type") == "domino", {"projector_type", *DOMINO_KEYS}, _domino_fault)):
        if is_there:
            known |= keys
            if fault := fault_of(own, config["hidden_size"], config["vocab_size"]):
                yield error("contract", f"dflash_config: {fault}", "serve this one in SGLang")
                return
    if set(own) != known:
        yield error("contract", f"dflash_config has {sorted(own)}, not {sorted(known)}",
                    "serve other variants in SGLang")
        return
    size, mask, depth, ids = (own[key] for key in ("block_size", "mask_token_id", "num_target_layers",
                                                    "target_layer_ids"))
    if not _whole(size, least_block, least_block + 15):
        yield error("contract", f"dflash_config.block_size is {size!r}, not between {least_block} and "
                    f"{least_block + 15}", again)
    elif not _whole(mask, 0, config["vocab_size"] - 1):
        yield error("contract", f"dflash_config.mask_token_id is {mask!r}, outside a vocabulary of "
                    f"{config['vocab_size']}", again)
    elif not _whole(depth, 1, None):
        yield error("contract", f"dflash_config.num_target_layers is {depth!r}, not a number of layers", again)
    elif not isinstance(ids, list) or not ids or not all(_whole(layer, 0, depth - 2) for layer in ids) or (
            ids != sorted(set(ids))):
        yield error("contract", f"dflash_config.target_layer_ids is {ids!r}, not ascending outputs of layers 0 to "
                    f"{depth - 2}", again)


DOMINO_KEYS = ("pure_draft_prefix_len", "shift_label", "gru_hidden_dim", "emb_dim")


def _domino_fault(own: Mapping[str, Any], _hidden: int, _vocab: int) -> str | None:
    """The first fault of what Domino adds to `dflash_config`; SGLang 0.5.23 has the same rules."""
    if own.get("pure_draft_prefix_len") != 1 or not isinstance(own.get("shift_label"), bool):
        return (f"pure_draft_prefix_len is {own.get('pure_draft_prefix_len')!r} and shift_label "
                f"{own.get('shift_label')!r}, not 1 and true or false")
    if not (_whole(own.get("gru_hidden_dim"), 1, None) and _whole(own.get("emb_dim"), 1, None)):
        return (f"gru_hidden_dim is {own.get('gru_hidden_dim')!r} and emb_dim {own.get('emb_dim')!r}, not positive "
                "whole numbers")
    return None


LILICORR_KEYS = tuple(f"lilicorr_{name}" for name in (
    "candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim", "vector_eps", "logit_scale"))
_CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
_SELECTOR_KEYS = ("selector_rank", "selector_top_k", *_CONVOLUTION_KEYS)


def _lilicorr_fault(own: Mapping[str, Any], hidden: int, vocab: int) -> str | None:
    """The first fault of what LiLiCorr adds to `dflash_config`; SGLang 0.5.23 has the same rules."""
    for key in LILICORR_KEYS[:4] + LILICORR_KEYS[5:6]:
        if not _whole(own.get(key), 0 if key == "lilicorr_hidden_size" else 1, None):
            return f"{key} is {own.get(key)!r}, not a positive whole number"
    for key in ("lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale"):
        if not _positive(own.get(key)):
            return f"{key} is {own.get(key)!r}, not a positive number"
    top_k, width, heads = (own[f"lilicorr_{name}"] for name in ("candidate_topk", "hidden_size", "num_heads"))
    if top_k & (top_k - 1) or top_k > min(16, vocab):
        return f"lilicorr_candidate_topk is {top_k}, not a power of two up to 16"
    if (width or hidden) % heads:
        return f"lilicorr_num_heads is {heads}, which does not divide a width of {width or hidden}"
    return _convolution_fault(own, hidden)


def _selector_fault(own: Mapping[str, Any], hidden: int, vocab: int) -> str | None:
    """The first fault of what DFlash2 adds to `dflash_config`."""
    if not (_whole(own.get("selector_rank"), 1, None) and _whole(own.get("selector_top_k"), 1, vocab)):
        return (f"selector_rank is {own.get('selector_rank')!r} and selector_top_k {own.get('selector_top_k')!r}, not "
                f"positive whole numbers, the second up to {vocab}")
    for key in ("output_multiplier", "final_logit_softcapping"):
        if own.get(key) is not None and not _positive(own[key]):
            return f"{key} is {own[key]!r}, not a positive number"
    return _convolution_fault(own, hidden)


def _convolution_fault(own: Mapping[str, Any], hidden: int) -> str | None:
    taps, group = own.get("conv_kernel_size") or 0, own.get("conv_group_size") or 0
    if (taps, group) != (0, 0) and not (_whole(taps, 1, 16) and _whole(group, 1, hidden) and hidden % group == 0):
        return f"conv_kernel_size is {taps!r} and conv_group_size {group!r}, not up to 16 and a divisor of {hidden}"
    return None


def dspark_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """A DSpark drafter's config; the first fault."""
    kind, rank = config.get("markov_head_type"), config.get("markov_rank")
    if kind not in get_args(MarkovHeadKind) or not _whole(rank, 1, None):
        yield error("contract", f"markov_head_type is {kind!r} and markov_rank {rank!r}: not one of "
                    f"{', '.join(get_args(MarkovHeadKind))} and a positive whole number", "export the drafter again")
    elif config.get("enable_confidence_head") and config.get("confidence_head_with_markov", True) is not True:
        yield error("contract", "confidence_head_with_markov is false: Eyrie's confidence heads read the token before",
                    "serve this one in SGLang")
    else:
        yield from block_rules(config, 1)


def heads_rules(family: str, shared_output: bool, config: Mapping[str, Any]) -> Iterator[Finding]:
    """The config of a Medusa or Hydra drafter.

    shared_output   whether all heads have one output matrix
    """
    again = "export the drafter again"
    for key in ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads"):
        if not _whole(config.get(key), 1, None):
            yield error("contract", f"{key} is {config.get(key)!r}, not a positive whole number", again)
            return
    for key, expected in (("architectures", [FAMILIES[family].architecture]), ("num_hidden_layers", 1),
                          ("original_lm_head", shared_output), ("medusa_fc_bias", False)):
        if config.get(key) != expected:
            yield error("contract", f"{key} is {config.get(key)!r}; Eyrie's {family} drafters have {expected!r}", again)
            return
    if config["truncated_vocab_size"] > config["vocab_size"]:
        yield error("contract", f"truncated_vocab_size {config['truncated_vocab_size']} is more than vocab_size "
                    f"{config['vocab_size']}", again)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _whole(value: object, least: int, most: int | None) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool) and value >= least
            and (most is None or value <= most))


DECODERS: dict[str, Callable[[Mapping[str, Any]], Iterator[Finding]]] = {
    "eagle1": partial(one_layer_rules, "eagle1", "serve this one in SGLang, or train one"),
    "mtp": partial(one_layer_rules, "mtp", "train another family"), "standalone": standalone_rules,
    "dflash": lambda config: block_rules(config, 2), "dspark": dspark_rules}
SHARED_OUTPUT = {"medusa": False, "hydra": True}
"""Families of heads; whether all heads of one have one output matrix."""


def config_rules(family: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings of a family that loads with the config alone; none for one without rules. EAGLE-3 has its own."""
    if family in SHARED_OUTPUT:
        yield from heads_rules(family, SHARED_OUTPUT[family], config)
    elif family in DECODERS:
        # A config whose values are of other types, or whose layers are not computed, is not read further.
        yield from [*kind_rules(config)] or [*decoder_rules(config)] or DECODERS[family](config)


def decoder_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `DecoderSizes` of a config that has its keys."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {"hidden_size": hidden, "num_layers": config["num_hidden_layers"],
            "intermediate_size": config["intermediate_size"], "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads}


def expected_tensors(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a drafter of `DECODERS` whose config has no faults."""
    hidden, sizes = config["hidden_size"], TargetFacts(
        **decoder_sizes(config), vocab_size=config["vocab_size"], tie_word_embeddings=False, source="config.json")
    model = target_files.expected_tensors(config, sizes)
    if family == "standalone":
        return model
    layers = {name.removeprefix("model."): shape for name, shape in model.items() if name.startswith("model.layers.")}
    if family == "eagle1":
        del layers["layers.0.input_layernorm.weight"]
        return {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)} | layers
    if family == "mtp":
        own = {name.removeprefix("layers.0."): shape for name, shape in layers.items() if name.startswith("layers.0.")}
        own |= {f"{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
        own["input_proj.weight"] = (hidden, 2 * hidden)
        return {MTP_LAYER + name: shape for name, shape in own.items()}
    own = config["dflash_config"]
    num_aux = len(own["target_layer_ids"])
    layers |= _dflash2_tensors(config, sizes)
    if "lilicorr_hidden_size" in own:
        layers |= _lilicorr_tensors(own, hidden)
    if "gru_hidden_dim" in own:
        state, rank = own["gru_hidden_dim"], own["emb_dim"]
        layers |= {"prefix_gru.weight_ih_l0": (3 * state, hidden), "prefix_gru.weight_hh_l0": (3 * state, state),
                   "embed_proj.0.weight": (rank, hidden + state), "embed_proj.2.weight": (config["vocab_size"], rank)}
    if family == "dspark":
        layers |= _markov_tensors(config["markov_head_type"], config["markov_rank"], config["vocab_size"], hidden)
        if config.get("enable_confidence_head"):
            layers |= {"confidence_head.proj.weight": (1, hidden + config["markov_rank"]),
                       "confidence_head.proj.bias": (1,)}
    return {"fc.weight": (hidden, num_aux * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)} | layers


def _dflash2_tensors(config: Mapping[str, Any], sizes: TargetFacts) -> dict[str, tuple[int, ...]]:
    own, hidden, added = config["dflash_config"], sizes.hidden_size, dict[str, tuple[int, ...]]()
    if "selector_rank" in own:
        rank, name = own["selector_rank"], "candidate_selector."
        added |= dict.fromkeys((f"{name}predecessor_codebook", f"{name}successor_codebook"), (sizes.vocab_size, rank))
        added[f"{name}hidden_projection.weight"] = (rank, hidden)
    if taps := own.get("conv_kernel_size"):
        for name in (f"layers.{layer}.{part}_conv." for layer in range(sizes.num_layers)
                     for part in ("attention", "mlp")):
            added |= {f"{name}base_kernel": (2, taps, hidden),
                      f"{name}kernel_projection.weight": (2 * taps * (hidden // own["conv_group_size"]), hidden)}
    return added


def _lilicorr_tensors(own: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    top_k, width, num_layers, heads, ratio, factor = (own[key] for key in LILICORR_KEYS[:6])
    width, slots = width or hidden, own["block_size"] - 1
    products = {"pass_hidden_proj": (width, hidden), "context_proj": (width, hidden),
                "feature_mlp.up_proj": (width, 5), "feature_mlp.down_proj": (width, width),
                "factor_input_proj": (width, 3 * width), "out_head": (factor, width), "in_head": (factor, width),
                "anchor_out_head": (factor, width)}
    if width != hidden:
        products["token_proj"] = (width, hidden)
    named: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (5,), "feature_norm.bias": (5,), "slot_embedding": (1, 1, slots, 1, width),
        "rank_embedding": (1, 1, 1, top_k, width), "relative_slot_bias": (heads, 2 * slots + 1),
        "same_slot_bias": (heads,), "output_norm.weight": (width,), "anchor_norm.weight": (width,)}
    for layer in (f"layers.{number}." for number in range(num_layers)):
        inner = int(width * ratio)
        products |= {f"{layer}attn.out_proj": (width, width), f"{layer}mlp.up_proj": (inner, width),
                     f"{layer}mlp.down_proj": (width, inner)}
        named |= {f"{layer}attn.in_proj_weight": (3 * width, width), f"{layer}attn.in_proj_bias": (3 * width,),
                  f"{layer}attn_norm.weight": (width,), f"{layer}mlp_norm.weight": (width,)}
    for name, shape in products.items():
        named |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in named.items()}


def _markov_tensors(kind: str, rank: int, vocab: int, hidden: int) -> dict[str, tuple[int, ...]]:
    head: dict[str, tuple[int, ...]] = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (vocab, rank)}
    if kind == "gated":
        head |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
    elif kind == "rnn":
        head |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    return {f"markov_head.{name}": shape for name, shape in head.items()}


def tensor_rules(tensors: Mapping[str, Header], expected: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Names and shapes are exactly the expected ones."""
    hint = "export the drafter again; its config.json and its tensors are not of one drafter"
    for name in expected:
        if name not in tensors:
            yield error("contract", f"{name} is missing", hint)
    for name in tensors:
        if name not in expected:
            yield error("contract", f"{name} is not known", hint)
    for name, shape in expected.items():
        actual = tensors[name].shape if name in tensors else None
        if actual is not None and actual != tuple(shape):
            yield error("contract", f"{name} has shape {list(actual)}, not {list(shape)}", hint)


@dataclass(frozen=True)
class TargetSizes:
    """What the families other than EAGLE-3 require of the target."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    eos_token_ids: tuple[int, ...]


def fit_rules(drafter: str, family: str | None, config: Mapping[str, Any], target: TargetSizes) -> Iterator[Finding]:
    """Whether a drafter without other findings is of the target. `drafter` names it in the messages."""
    again = "serve it with its own target"
    hidden, vocab = config.get("hidden_size"), config.get("vocab_size")
    if family == "standalone" and vocab != target.vocab_size:
        yield error("contract", f"{drafter} has a vocabulary of {vocab}, this target one of {target.vocab_size}", again)
    elif family in ("dflash", "dspark"):
        own = config["dflash_config"]
        sizes = (hidden, vocab, own["num_target_layers"])
        wanted = (target.hidden_size, target.vocab_size, target.num_layers)
        if sizes != wanted:
            yield error("contract", f"{drafter} is for a target of width, vocabulary and layers {sizes}; this "
                        f"target has {wanted}", again)
        elif own["mask_token_id"] in target.eos_token_ids:
            yield error("contract", f"{drafter}: dflash_config.mask_token_id {own['mask_token_id']} ends answers of "
                        "this target", again)
    elif family in ("eagle1", "mtp", "eagle3", *SHARED_OUTPUT) and (hidden, vocab) != (
            target.hidden_size, target.vocab_size):
        yield error("contract", f"{drafter} is for a target of hidden size {hidden} and vocabulary {vocab}, this "
                    f"target has {target.hidden_size} and {target.vocab_size}", again)
