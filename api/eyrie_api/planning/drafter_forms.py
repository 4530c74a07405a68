"""The forms that drafters are published in, and what each becomes: config.json and tensor names of one of our families.

Pure. Submission converts the config to check it (`planning.published_drafters`); the stage that reads the drafter
converts config and tensors (`eyrie_workers.drafters.export`). Forms are recognised by the config, and by `fc.weight`
where the config does not tell: EAGLE's authors give a drafter the architecture name of a Llama.

    EAGLE-1/2      LlamaForCausalLM with an fc from [embedding, state] (authors'; may lack fc.bias: zeros),
                   LlamaForCausalLMEagle (SGLang)
    EAGLE-3        LlamaForCausalLM with an fc and draft_vocab_size (authors'), LlamaForCausalLMEagle3 (SpecForge,
                   SGLang, Model Optimizer), Eagle3LlamaForCausalLM (AngelSlim, vLLM)
    speculators    speculators_model_type; the layer's config is nested, layer ids are vLLM's
    DFlash         DFlashDraftModel; sizes of the block are in dflash_config or at the top level
    DFlash2        DFlash2DraftModel and SGLang's other names of it; drafted with and not trained
    DSpark         DSparkDraftModel (SpecForge), Qwen3DSparkModel (DeepSpec), or DFlashDraftModel with a rank (Model
                   Optimizer): DFlash with a Markov head. A confidence head that reads the state alone is dropped
    draft model    LlamaForCausalLM without an fc

Absent keys get the trainers' defaults: a rotary base of 10000, EAGLE-3's layers as SGLang and vLLM choose them,
DFlash's layers spread over the target as its authors do. A stored copy of the target's embedding or output matrix is
dropped, since every engine reads the target's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.errors import InvalidInput
from eyrie_api.planning import drafter_rules, eagle3_rules
from eyrie_api.planning.drafter_rules import (
    DFLASH2,
    DOMINO_KEYS,
    LAYER_IDS,
    LILICORR,
    LILICORR_KEYS,
    Finding,
    Header,
    Target,
    foreign_architecture,
)
from eyrie_api.planning.eagle3_rules import MAPS, canonical_name, joins_one_state, nested
from eyrie_api.planning.sglang_support import captured_inputs, holds_mtp_layers, sglang_layer_ids
from eyrie_api.planning.target_config import DEFAULT_ROPE_THETA

LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters",
    "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "layer_types", "dtype",
    "torch_dtype", "bos_token_id", "eos_token_id")
"""Keys of a config that describe the layer; the speculators format nests them."""

INIT_FROM = "drafter.init_from"
_LLAMA = ["LlamaForCausalLM"]
_EAGLE3 = FAMILIES["eagle3"].architecture
UNSERVED = frozenset({"target-not-captured"})
"""Findings about SGLang alone; `planning.preflight` refuses such jobs where SGLang is the engine."""


@dataclass(frozen=True)
class Form:
    """A drafter as one of ours."""

    family: str | None
    """None: an EAGLE-1/2 drafter or a draft model, which the config does not tell apart."""

    config: dict[str, Any]
    name_of: Callable[[str], str | None]
    """From a tensor's name in the source; None: the tensor is left out."""

    ties_head: bool = False
    """The output matrix is the embedding, and is to be written out."""

    def headers(self, tensors: Mapping[str, Header]) -> dict[str, Header]:
        """The tensors of the converted drafter, with those that the conversion makes."""
        made = {name: tensor for stored, tensor in tensors.items() if (name := self.name_of(stored)) is not None}
        if self.family == "eagle1":
            made.setdefault("fc.bias", Header(None, None))
        if self.ties_head:
            made.setdefault("lm_head.weight", Header(None, None))
        return made


def convert(config: Mapping[str, Any], tensors: Mapping[str, Header] | None, architecture: str | None,
            num_layers: int | None) -> Form:
    """What a drafter becomes.

    tensors                    by their names in the files; None: unknown
    architecture, num_layers   of the target; None: unknown

    Raises InvalidInput for a form that no family reads, with the reason and where it is served.
    """
    names = config.get("architectures")
    if "speculators_model_type" in config:
        return _from_speculators(config, architecture, num_layers)
    if reason := foreign_architecture(config):
        raise InvalidInput(*reason)
    if names == _LLAMA:
        fc = None if tensors is None else tensors.get("fc.weight") or tensors.get("model.fc.weight")
        if fc is not None and joins_one_state(config, fc):
            return _eagle1(config)
        if fc is None and (tensors is not None or "draft_vocab_size" not in config):
            return Form(None if tensors is None else "standalone",
                        _with_rope(config) | {"tie_word_embeddings": False}, _stored,
                        bool(config.get("tie_word_embeddings")))
    if names == [FAMILIES["eagle1"].architecture]:
        return _eagle1(config)
    if names in (_LLAMA, ["Eagle3LlamaForCausalLM"], [_EAGLE3]):
        return _eagle3(config, architecture, num_layers)
    own = _block_section(config)
    if names in ([FAMILIES["dspark"].architecture], ["Qwen3DSparkModel"]) or (names == _DFLASH and (
            own.get("projector_type") == "dspark" or own.get("markov_rank") or config.get("markov_rank"))):
        return _dspark(config, num_layers)
    if names == ["DominoDraftModel"]:  # SpecForge's class of it
        config, names = {**config, "architectures": _DFLASH, "dflash_config": {
            "projector_type": "domino", **own}}, _DFLASH
    if names in _DFLASH2 or _IS_DFLASH2 in own.items():
        return Form("dflash", _dflash(config, num_layers) | {"architectures": [DFLASH2]}, _stored)
    if names == [LILICORR] or own.get("projector_type") == "lilicorr":
        return Form("dflash", _dflash(config, num_layers) | {"architectures": [LILICORR]}, _stored)
    family = next((row.name for row in FAMILIES.values()
                   if names == [row.architecture] and row.of_target == holds_mtp_layers(config)), None)
    if family is None:
        raise InvalidInput(f"it is of architecture {names!r}, which no family of Eyrie reads",
                           "name a drafter of a family that `eyrie certify --check-only` knows")
    return Form(family, _dflash(config, num_layers) if family == "dflash" else dict(config), _stored)


def _stored(name: str) -> str | None:
    return None if name.endswith("rotary_emb.inv_freq") else name  # of old checkpoints; computed


def _with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the rotary base that trainers take for an absent one."""
    parts = [config, *(part for key in ("rope_parameters", "rope_scaling")
                       if isinstance(part := config.get(key), Mapping))]
    if any(part.get("rope_theta") is not None for part in parts):
        return dict(config)
    return dict(config) | {"rope_theta": DEFAULT_ROPE_THETA}


def _eagle1(config: Mapping[str, Any]) -> Form:
    if config.get("qkv_bias"):
        raise InvalidInput("qkv_bias is true: SGLang's class of EAGLE-1/2 drafters, and Eyrie's, have no biases on q, "
                           "k and v", "train one without")

    def name_of(name: str) -> str | None:
        return None if name.split(".")[0] in ("embed_tokens", "lm_head") else _stored(name)

    return Form("eagle1", _with_rope(config) | {
        "architectures": [FAMILIES["eagle1"].architecture], "model_type": "llama", "tie_word_embeddings": False},
        name_of)


def _eagle3(config: Mapping[str, Any], architecture: str | None, num_layers: int | None) -> Form:
    written = _with_rope(config) | {"architectures": [_EAGLE3], "model_type": "llama"}
    inner, top = nested(config).get(LAYER_IDS) or None, config.get(LAYER_IDS) or None
    if inner is None and num_layers is not None:
        if top is None:
            inner = _default_layers(num_layers)
        elif _are_numbers(top):
            inner = list(sglang_layer_ids(architecture or "", num_layers, top))
    if inner is not None and top is None and _are_numbers(inner):
        top = list(captured_inputs(architecture or "", inner, num_layers))
    section = config.get("eagle_config")
    if inner is not None and (section is None or isinstance(section, Mapping)):  # else `kind_rules` reports it
        written |= {LAYER_IDS: top, "eagle_config": dict(nested(config)) | {LAYER_IDS: inner}}
    return Form("eagle3", written, _eagle3_names(written))


def _default_layers(num_layers: int) -> list[int]:
    """The outputs of layers that SGLang captures where a config names none: those of EAGLE's authors."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def _are_numbers(ids: object) -> bool:
    return isinstance(ids, list) and all(isinstance(value, int) and not isinstance(value, bool) for value in ids)


def _eagle3_names(config: Mapping[str, Any]) -> Callable[[str], str | None]:
    whole = config.get("draft_vocab_size") == config.get("vocab_size")
    dropped = {*(MAPS if whole else ())}
    if (config.get("target_hidden_size") or config.get("hidden_size")) == config.get("hidden_size"):
        dropped.add("embed_tokens.weight")

    def name_of(name: str) -> str | None:
        canonical = canonical_name(name)
        return None if canonical in dropped or canonical.startswith("verifier_") else _stored(canonical)

    return name_of


def _from_speculators(source: Mapping[str, Any], architecture: str | None, num_layers: int | None) -> Form:
    kind, nested_layer = source.get("speculators_model_type"), source.get("transformer_layer_config")
    layer = dict(nested_layer) if isinstance(nested_layer, Mapping) else {}
    described = _with_rope({key: layer[key] for key in LAYER_KEYS if layer.get(key) is not None})
    if kind == "eagle":
        return _from_speculators_eagle1(source, layer, described)
    if kind != "eagle3":
        raise InvalidInput(f"it holds speculators_model_type {kind!r}",
                           "give an eagle3 drafter in speculators format, or the drafter in its authors' form")
    if source.get("norm_before_residual") is not False:
        raise InvalidInput("norm_before_residual is true or absent, which vLLM reads as true: SGLang always adds the "
                           "state before its norm", "train with norm_before_residual false")
    if layer.get("model_type", "llama") != "llama":
        raise InvalidInput(f"the drafter's layer is of type {layer['model_type']!r}, SGLang's is Llama's",
                           "train with a Llama layer")
    ids = source.get(LAYER_IDS)
    if ids is None and num_layers is not None:
        ids = [layer + 1 for layer in _default_layers(num_layers)]  # vLLM's are the same states
    if not _are_numbers(ids):
        raise InvalidInput(f"{LAYER_IDS} are not written", "find out which layers it was trained on")
    assert isinstance(ids, list)
    depth = num_layers if num_layers is not None else max(ids, default=0) + 1
    config = described | {
        "architectures": [_EAGLE3], "model_type": "llama", "tie_word_embeddings": False,
        "draft_vocab_size": source.get("draft_vocab_size"), "norm_before_residual": False,
        "target_hidden_size": source.get("target_hidden_size") or layer.get("hidden_size"),
        "num_aux_hidden_states": len(ids), LAYER_IDS: ids,
        "eagle_config": {"use_aux_hidden_state": True,
                         LAYER_IDS: list(sglang_layer_ids(architecture or "LlamaForCausalLM", depth, ids))}}
    config |= {flag: True for flag in ("fc_norm", "norm_output") if source.get(flag)}
    if source.get("norm_before_fc"):
        config["norm_before_fc"] = config["eagle_config"]["norm_before_fc"] = True
    return Form("eagle3", config, _eagle3_names(config))


def _from_speculators_eagle1(source: Mapping[str, Any], layer: Mapping[str, Any],
                             described: Mapping[str, Any]) -> Form:
    if source.get("layernorms"):
        raise InvalidInput("layernorms is true: it is a HASS drafter with norms that neither SGLang nor Eyrie computes",
                           "give an EAGLE-1/2 drafter without them")
    kind = source.get("transformer_layer_architecture", "LlamaDecoderLayer")
    if kind not in ("auto", "LlamaDecoderLayer") or layer.get("model_type", "llama") != "llama":
        raise InvalidInput(f"the drafter's layer is a {kind} of type {layer.get('model_type')!r}, SGLang's is Llama's",
                           "train with a Llama layer")
    ours = _eagle1({**described, "num_hidden_layers": 1})

    def name_of(name: str) -> str | None:
        for theirs, own in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
            if name.startswith(theirs):
                name = own + name.removeprefix(theirs)
        return ours.name_of(name)

    return Form("eagle1", ours.config, name_of)


_DFLASH = [FAMILIES["dflash"].architecture]
_IS_DFLASH2 = ("projector_type", "dflash2")  # Model Optimizer's
_DFLASH2 = [[DFLASH2], ["DFlash2BeamDraftModel"], ["MiniMaxDFlash2DraftModel"]]  # one class in SGLang
_NEUTRAL = {"causal": False, "use_swa": False, "attention_sink_bias": False, "projector_type": "dflash"}
"""Keys of `dflash_config` by which a trainer says that a variant is not used."""


def _dflash(config: Mapping[str, Any], num_layers: int | None) -> dict[str, Any]:
    """With all four keys in `dflash_config`, as SGLang and Eyrie's exports have them."""
    own = config.get("dflash_config", {})
    if not isinstance(own, Mapping):
        return dict(config)
    if config.get("is_causal"):
        raise InvalidInput("is_causal is true: in the blocks that Eyrie computes every position sees the whole block",
                           "serve this one in SGLang")
    settings = {key: value for key, value in own.items()
                if not (key in _NEUTRAL and value in (None, _NEUTRAL[key]))
                and (key, value) not in (_IS_DFLASH2, ("projector_type", "lilicorr"), ("lilicorr_enabled", True))}
    for key, absent in (("block_size", None), ("num_target_layers", num_layers), ("mask_token_id", None),
                        ("target_layer_ids", _spread_layers(config.get("num_hidden_layers"), num_layers))):
        value = settings.get(key, config.get(key))
        settings[key] = absent if value is None else value
    if settings.get("projector_type") == "domino":  # SGLang reads its sizes from either place
        settings |= {key: config[key] for key in DOMINO_KEYS if key in config and key not in settings}
    if settings["mask_token_id"] is None and settings.get("mask_token") is not None:
        raise InvalidInput(f"dflash_config names its mask {settings['mask_token']!r} and not its id",
                           "write dflash_config.mask_token_id, the token's id in the target's vocabulary")
    return _with_rope(config) | {"block_size": settings["block_size"],
                                 "num_target_layers": settings["num_target_layers"], "dflash_config": settings}


def _block_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer has written about the block, in one section or two."""
    parts = (config.get("dflash_config"), config.get("dspark_config"))
    return {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}


def _dspark(config: Mapping[str, Any], num_layers: int | None) -> Form:
    """With the head at the top level, where SGLang's class reads it, and the block in `dflash_config`."""
    own = _block_section(config)
    if own.get("sample_from_anchor", config.get("sample_from_anchor", True)) is not True:
        raise InvalidInput("sample_from_anchor is false: in Eyrie's blocks the settled token's position proposes too",
                           "serve this one in SGLang")
    head = {key: own.pop(key, config.get(key)) for key in ("markov_head_type", "markov_rank")}
    confidence = {key: own.pop(key, config.get(key)) for key in ("enable_confidence_head",
                                                                 "confidence_head_with_markov")}
    for key in ("sample_from_anchor", "projector_type"):
        own.pop(key, None)
    has_confidence = all(value is True for value in confidence.values())
    kept = {key: value for key, value in config.items() if key != "dspark_config"}
    dropped = ("embed_tokens", "lm_head", *(() if has_confidence else ("confidence_head",)))

    def name_of(name: str) -> str | None:
        name = name.removeprefix("model.")
        return None if name.split(".")[0] in dropped else _stored(name)

    return Form("dspark", _dflash(kept | {"dflash_config": own}, num_layers) | head | {
        "architectures": [FAMILIES["dspark"].architecture], "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence}, name_of)


def _spread_layers(num_draft_layers: object, num_layers: int | None) -> list[int] | None:
    """The outputs of layers that DFlash reads where its config names none, as its authors and SGLang choose them."""
    if num_layers is None or not isinstance(num_draft_layers, int) or num_draft_layers < 1:
        return None
    if num_draft_layers == 1:
        return [num_layers // 2]
    return [round(1 + layer * (num_layers - 4) / (num_draft_layers - 1)) for layer in range(num_draft_layers)]


def form_faults(form: Form, tensors: Mapping[str, Header] | None, target: Target) -> list[Finding]:
    """The errors that keep a drafter from being adopted, by its config and the headers of its tensors.

    tensors   by their names in the source
    """
    headers = None if tensors is None else form.headers(tensors)
    if form.family == "eagle3":
        found = [*eagle3_rules.rules(form.config, headers, target)]
    elif form.family is None:
        found = [*drafter_rules.kind_rules(form.config)] or [*drafter_rules.decoder_rules(form.config)]
        found += drafter_rules.vocabulary_rules(form.config, target)
    else:
        found = [*drafter_rules.config_rules(form.family, form.config)]
        if not found and headers is not None and form.family in drafter_rules.DECODERS:
            expected = drafter_rules.expected_tensors(form.family, form.config)
            found += drafter_rules.tensor_rules(headers, expected)
        found += drafter_rules.vocabulary_rules(form.config, target)
    return [finding for finding in found if finding.severity == "error" and finding.code not in UNSERVED]


def own_settings(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `DrafterSpec` that a drafter without faults has decided, and its values.

    config   as converted
    """
    settings = {name: config[name] for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings") if name in config}
    if family != "eagle3":
        if "num_hidden_layers" in config:
            settings["num_layers"] = config["num_hidden_layers"]
        if family in ("dflash", "dspark"):
            settings["aux_layers"] = tuple(layer + 1 for layer in config["dflash_config"]["target_layer_ids"])
        if family == "dspark":
            settings |= {"markov_head": config["markov_head_type"], "markov_rank": config["markov_rank"]}
        if family == "dflash":
            own = config["dflash_config"]
            selector = "dflash2" if own.get("conv_kernel_size") else "selector"
            settings["causal_head"] = ("domino" if "gru_hidden_dim" in own else "lilicorr" if LILICORR_KEYS[0] in own
                                       else selector if "selector_rank" in own else None)
        return settings
    shape = eagle3_rules.shape_of(config)
    return settings | {
        "draft_vocab_size": shape.draft_vocab_size, "aux_layers": eagle3_rules.aux_layers(config),
        "fc_norm": shape.fc_norm, "norm_before_fc": shape.norm_before_fc,
        "norm_output": bool(config.get("norm_output", False)), "sliding_window": config.get("sliding_window")}


def require_agreement(spec: DrafterSpec, family: str, config: Mapping[str, Any]) -> None:
    """Raises InvalidInput, naming both values, where the drafter of `spec.init_from` is not what the spec trains: its
    weights mean nothing with other values.

    family, config   of the drafter, as converted
    """
    if family != spec.family:
        raise InvalidInput(f"{INIT_FROM} {spec.init_from!r} is of family {family!r}, and drafter.family is "
                           f"{spec.family!r}", f"set drafter.family to {family!r}")
    for field, own in own_settings(family, config).items():
        wanted = getattr(spec, field)
        if wanted not in (None, False) and wanted != own:
            raise InvalidInput(f"drafter.{field} is {wanted}, and that of {INIT_FROM} {spec.init_from!r} is {own}",
                               f"leave drafter.{field} out, or train without {INIT_FROM}")
