"""Tiny random drafters in the forms that their authors publish: config keys, tensor names, dtypes and files.

Facts, read in November 2026, from which nothing is copied: configs and exporters of SafeAILab/EAGLE,
sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer, Tencent/AngelSlim, z-lab/dflash and
deepseek-ai/DeepSpec.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, DRAFT_VOCAB = 32, 64, 320, 128
HEADS, KV_HEADS, HEAD_DIM, NUM_TARGET_LAYERS = 4, 2, 8, 12
TARGET: dict[str, Any] = {"num_layers": NUM_TARGET_LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
"""Of `tests.tiny.tiny_target`."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """One form: what its authors write."""

    config: dict[str, Any]
    tensors: Tensors
    pickled: bool = False

    def write(self, to: Path) -> Path:
        to.mkdir(parents=True, exist_ok=True)
        (to / "config.json").write_text(json.dumps(self.config))
        if self.pickled:
            torch.save(self.tensors, to / "pytorch_model.bin")
        else:
            save_file(self.tensors, to / "model.safetensors")
        return to


def _random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {name: (torch.ones(shape) + 0.1 * torch.randn(shape, generator=generator) if len(shape) == 1 else
                   0.1 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def _layer(prefix: str, width: int = HIDDEN, norms: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width), "self_attn.o_proj": (HIDDEN, queries),
                "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    vectors = {norm: (HEAD_DIM if norm.startswith("self_attn") else HIDDEN,) for norm in norms}
    return {f"{prefix}{name}.weight": shape for name, shape in (matrices | vectors).items()}


def _llama(**keys: Any) -> dict[str, Any]:
    """The keys that every trainer writes for one Llama layer."""
    return {"model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1,
            "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "initializer_range": 0.02, "use_cache": True} | keys


_EAGLE3_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def _eagle3_tensors(prefix: str, dtype: torch.dtype, *, t2d: bool = True, embedding: bool = False) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCAB, HIDDEN)}
    shapes |= _layer(prefix, 2 * HIDDEN, _EAGLE3_NORMS)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[ids] = True
    return (_random(shapes | ({"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {}), dtype)
            | {"d2t": ids - torch.arange(DRAFT_VOCAB)} | ({"t2d": marked} if t2d else {}))


def _eagle1_tensors(fc: str, layer: str, dtype: torch.dtype, *, embedding: bool) -> Tensors:
    shapes = {f"{fc}weight": (HIDDEN, 2 * HIDDEN)} | _layer(layer, HIDDEN, ("post_attention_layernorm",))
    return _random(shapes | ({"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {}), dtype)


def eagle_1() -> Published:
    """As the authors' EAGLE-1/2: the architecture of the target, no rotary base, no bias, pickled."""
    return Published(_llama(architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, pad_token_id=0,
                            bias=False, torch_dtype="float16", transformers_version="4.28.1"),
                     _eagle1_tensors("fc.", "layers.0.", torch.float16, embedding=True)
                     | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2)}, pickled=True)


def eagle_1_for_sglang() -> Published:
    """The same, renamed for SGLang, with a bias."""
    plain = eagle_1()
    return Published(plain.config | {"architectures": ["LlamaForCausalLMEagle"]},
                     plain.tensors | {"fc.bias": torch.zeros(HIDDEN, dtype=torch.float16)})


def eagle_3() -> Published:
    """As the authors' EAGLE-3: the same, with a draft vocabulary, and no layer ids."""
    return Published(_llama(architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, pad_token_id=0,
                            draft_vocab_size=DRAFT_VOCAB, torch_dtype="float16", transformers_version="4.28.1"),
                     _eagle3_tensors("midlayer.", torch.float16), pickled=True)


def specforge() -> Published:
    """SpecForge's EAGLE-3: SGLang's name, no rotary base in 6 of 26 configs, no layer ids in most."""
    return Published(_llama(architectures=["LlamaForCausalLMEagle3"], attention_bias=False, attention_dropout=0.0,
                            bos_token_id=1, eos_token_id=2, head_dim=HEAD_DIM, draft_vocab_size=DRAFT_VOCAB,
                            max_window_layers=NUM_TARGET_LAYERS, rope_scaling=None, sliding_window=None,
                            use_sliding_window=False, torch_dtype="bfloat16", transformers_version="4.51.0"),
                     _eagle3_tensors("midlayer.", torch.bfloat16))


def specforge_with_layers() -> Published:
    """SpecForge's EAGLE-3 with layer ids, which stand in eagle_config alone, and an exported embedding."""
    plain = specforge()
    return Published(plain.config | {"rope_theta": 1000000.0, "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 6, 9], "use_aux_hidden_state": True}},
        _eagle3_tensors("midlayer.", torch.bfloat16, embedding=True))


def _speculators(kind: str, layer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"speculators_model_type": kind, "speculators_version": "0.3.0", "torch_dtype": "bfloat16",
            "transformer_layer_config": layer, "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}}} | keys


def speculators() -> Published:
    """An EAGLE-3 drafter that speculators converted: layers by number, a copy of the embedding, no layer ids."""
    layer = _llama(attention_bias=False, mlp_bias=False, head_dim=HEAD_DIM, rope_theta=500000.0, rope_scaling=None,
                   pretraining_tp=1)
    return Published(_speculators("eagle3", layer, architectures=["Eagle3Speculator"], draft_vocab_size=DRAFT_VOCAB,
                                  norm_before_residual=False, target_hidden_size=None),
                     _eagle3_tensors("layers.0.", torch.bfloat16, embedding=True))


def speculators_eagle_1() -> Published:
    """An EAGLE-1 drafter that speculators converted."""
    layer = _llama(attention_bias=False, mlp_bias=False, rope_theta=10000.0, rope_scaling=None)
    return Published(_speculators("eagle", layer, architectures=["EagleSpeculator"], layernorms=False,
                                  fusion_bias=False, transformer_layer_architecture="LlamaDecoderLayer"),
                     _eagle1_tensors("fusion_fc.", "transformer.", torch.bfloat16, embedding=False))


def model_optimizer() -> Published:
    """NVIDIA Model Optimizer's EAGLE-3: layers by number, d2t without t2d, its own flags in eagle_config."""
    flags = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "use_last_layernorm": True,
             "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True,
             "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}
    return Published(_llama(architectures=["LlamaForCausalLMEagle3"], attention_bias=False, attention_dropout=0.0,
                            mlp_bias=None, bos_token_id=1, eos_token_id=[2], head_dim=HEAD_DIM, pad_token_id=None,
                            pretraining_tp=None, draft_vocab_size=DRAFT_VOCAB, rope_theta=500000.0, rope_scaling={
                                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 128},
                            torch_dtype="bfloat16", transformers_version="4.55.0", eagle_config=flags),
                     _eagle3_tensors("layers.0.", torch.bfloat16, t2d=False))


def angelslim() -> Published:
    """AngelSlim's EAGLE-3: vLLM's name."""
    return Published(specforge().config | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1000000},
                     _eagle3_tensors("midlayer.", torch.bfloat16), pickled=True)


def _dflash_tensors(num_layers: int, num_aux: int) -> Tensors:
    norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
    shapes = {"fc.weight": (HIDDEN, num_aux * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(num_layers):
        shapes |= _layer(f"layers.{layer}.", HIDDEN, norms)
    return _random(shapes, torch.bfloat16)


def dflash() -> Published:
    """The authors' DFlash: block_size and num_target_layers at the top level."""
    config = _llama(
        architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"}, model_type="qwen3",
        attention_bias=False, attention_dropout=0.0, block_size=8, bos_token_id=1, eos_token_id=2, head_dim=HEAD_DIM,
        dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 5, 9]}, dtype="bfloat16",
        layer_types=["full_attention"] * 2, max_window_layers=2, num_hidden_layers=2,
        num_target_layers=NUM_TARGET_LAYERS, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        use_sliding_window=False)
    return Published(config, _dflash_tensors(2, 3))


def dflash_newer() -> Published:
    """The authors' later DFlash: the block's size in dflash_config, no depth of the target; Model Optimizer's keys."""
    older = dflash().config
    config = {key: value for key, value in older.items() if key not in ("block_size", "num_target_layers", "rope_theta",
                                                                         "rope_scaling")}
    return Published(config | {"is_causal": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
                               "dflash_config": older["dflash_config"] | {"block_size": 8, "causal": False}},
                     _dflash_tensors(2, 3))


def dflash2() -> Published:
    """The authors' DFlash2: a selector and convolutions."""
    older, conv = dflash_newer(), dict[str, tuple[int, ...]]()
    for name in (f"layers.{layer}.{part}_conv." for layer in range(2) for part in ("attention", "mlp")):
        conv |= {f"{name}base_kernel": (2, 2, HIDDEN), f"{name}kernel_projection.weight": (2 * 2 * HIDDEN // 8, HIDDEN)}
    name, own = "candidate_selector.", {"selector_rank": 4, "selector_top_k": 8, "conv_kernel_size": 2,
                                        "conv_group_size": 8, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    return Published(older.config | {"architectures": ["DFlash2DraftModel"],
                                     "dflash_config": older.config["dflash_config"] | own},
                     older.tensors | _random(conv | {
                         f"{name}predecessor_codebook": (VOCAB, 4), f"{name}successor_codebook": (VOCAB, 4),
                         f"{name}hidden_projection.weight": (4, HIDDEN)}, torch.bfloat16))


def dflash2_of_model_optimizer() -> Published:
    """Model Optimizer's DFlash2: the architecture of DFlash, and candidates as the target's head has them."""
    made = dflash2()
    own = {key: value for key, value in made.config["dflash_config"].items()
           if key not in ("output_multiplier", "final_logit_softcapping")}
    return Published(made.config | {"architectures": ["DFlashDraftModel"],
                                    "dflash_config": own | {"projector_type": "dflash2"}}, made.tensors)


def lilicorr() -> Published:
    """Model Optimizer's LiLiCorr: the architecture of DFlash, and a head of one layer."""
    older, width = dflash_newer(), 8
    slots = older.config["dflash_config"]["block_size"] - 1
    own = {"projector_type": "lilicorr", "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": width,
           "lilicorr_num_layers": 1, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 6,
           "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0}
    products = {"token_proj": (width, HIDDEN), "pass_hidden_proj": (width, HIDDEN), "context_proj": (width, HIDDEN),
                "feature_mlp.up_proj": (width, 5), "feature_mlp.down_proj": (width, width),
                "layers.0.attn.out_proj": (width, width), "layers.0.mlp.up_proj": (2 * width, width),
                "layers.0.mlp.down_proj": (width, 2 * width), "factor_input_proj": (width, 3 * width),
                "out_head": (6, width), "in_head": (6, width), "anchor_out_head": (6, width)}
    head: dict[str, tuple[int, ...]] = {
        "slot_embedding": (1, 1, slots, 1, width), "rank_embedding": (1, 1, 1, 4, width),
        "relative_slot_bias": (2, 2 * slots + 1), "same_slot_bias": (2,), "feature_norm.weight": (5,),
        "feature_norm.bias": (5,), "layers.0.attn.in_proj_weight": (3 * width, width),
        "layers.0.attn.in_proj_bias": (3 * width,)}
    for name, shape in products.items():
        head |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    head |= dict.fromkeys((f"{name}.weight" for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm",
                                                         "anchor_norm")), (width,))
    return Published(older.config | {"architectures": ["DFlashDraftModel"],
                                     "dflash_config": older.config["dflash_config"] | own},
                     older.tensors | _random({f"lilicorr.{name}": shape for name, shape in head.items()},
                                             torch.bfloat16))


def domino() -> Published:
    """SpecForge's Domino: DFlash with a GRU over the drafted tokens; the rank at the top level, too."""
    plain, own = dflash(), {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True,
                            "gru_hidden_dim": 6, "emb_dim": 4}
    return Published(plain.config | {"emb_dim": 4, "dflash_config": plain.config["dflash_config"] | own},
                     plain.tensors | _random({
                         "prefix_gru.weight_ih_l0": (18, HIDDEN), "prefix_gru.weight_hh_l0": (18, 6),
                         "embed_proj.0.weight": (4, HIDDEN + 6), "embed_proj.2.weight": (VOCAB, 4)}, torch.bfloat16))


def dspark() -> Published:
    """SpecForge's DSpark: DFlash with a Markov head."""
    plain = dflash()
    markov = {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla",
              "enable_confidence_head": False}
    return Published(plain.config | {"architectures": ["DSparkDraftModel"],
                                     "dflash_config": plain.config["dflash_config"] | markov},
                     plain.tensors | _random({"markov_head.markov_w1.weight": (VOCAB, 4),
                                              "markov_head.markov_w2.weight": (VOCAB, 4)}, torch.bfloat16))


def dspark_of_deepspec() -> Published:
    """DeepSpec's DSpark: all keys at the top level, with a confidence head."""
    config = {key: value for key, value in dspark().config.items() if key != "dflash_config"}
    return Published(config | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": VOCAB - 1, "num_anchors": 512,
                               "target_layer_ids": [1, 5, 9], "markov_rank": 4, "markov_head_type": "vanilla",
                               "enable_confidence_head": True, "confidence_head_with_markov": True},
                     dspark().tensors | _random({
                                   "confidence_head.proj.weight": (1, HIDDEN + 4), "confidence_head.proj.bias": (1,)},
                                   torch.bfloat16))


def dspark_of_model_optimizer() -> Published:
    """Model Optimizer's DSpark: the architecture of DFlash."""
    return Published(dspark().config | {"architectures": ["DFlashDraftModel"]}, dspark().tensors)


def _changed(program: Callable[[], Published], **keys: Any) -> Callable[[], Published]:
    return lambda: Published(program().config | keys, program().tensors, program().pickled)


READ: dict[str, tuple[Callable[[], Published], str]] = {
    "EAGLE-1": (eagle_1, "eagle1"), "EAGLE-1 for SGLang": (eagle_1_for_sglang, "eagle1"),
    "EAGLE-3": (eagle_3, "eagle3"), "SpecForge": (specforge, "eagle3"),
    "SpecForge with layer ids": (specforge_with_layers, "eagle3"), "speculators": (speculators, "eagle3"),
    "speculators EAGLE-1": (speculators_eagle_1, "eagle1"), "Model Optimizer": (model_optimizer, "eagle3"),
    "AngelSlim": (angelslim, "eagle3"), "DFlash": (dflash, "dflash"), "DFlash, newer": (dflash_newer, "dflash"),
    "DFlash2": (dflash2, "dflash"), "LiLiCorr": (lilicorr, "dflash"), "Domino": (domino, "dflash"),
    "DFlash2 of Model Optimizer": (dflash2_of_model_optimizer, "dflash"),
    "Domino by its class": (_changed(domino, architectures=["DominoDraftModel"]), "dflash"),
    "DSpark": (dspark, "dspark"), "DSpark of DeepSpec": (dspark_of_deepspec, "dspark"),
    "DSpark of Model Optimizer": (dspark_of_model_optimizer, "dspark")}
"""Form -> its program, and the family that it becomes."""


REFUSED: dict[str, tuple[Callable[[], Published], str, str]] = {
    "DSpark without the anchor": (_changed(dspark, sample_from_anchor=False), "sample_from_anchor is false",
                                  "in SGLang"),
    "speculators DSpark": (_changed(speculators, speculators_model_type="dspark"), "speculators_model_type 'dspark'",
                           "authors' form"),
    "speculators DFlash": (_changed(speculators, speculators_model_type="dflash"), "speculators_model_type 'dflash'",
                           "authors' form"),
    "speculators with norm_before_residual": (_changed(speculators, norm_before_residual=True),
                                              "norm_before_residual is true", "norm_before_residual false"),
    "HASS": (_changed(speculators_eagle_1, layernorms=True), "HASS drafter with norms", "without them"),
    "EAGLE-1 of Qwen 2": (_changed(eagle_1, qkv_bias=True), "qkv_bias is true", "without"),
    "Domino with a longer prefix": (lambda: Published({**domino().config, "dflash_config": {
        **domino().config["dflash_config"], "pure_draft_prefix_len": 2}}, domino().tensors),
        "pure_draft_prefix_len is 2", "in SGLang"),
    "DFlash with a window": (_changed(dflash, dflash_config={"use_swa": True, "swa_window_size": 64,
                                                             "mask_token_id": 9}),
                             "dflash_config has .*use_swa", "in SGLang"),
    "DFlash, causal": (_changed(dflash, is_causal=True), "is_causal is true", "in SGLang"),
    "EAGLE-3 with MLA": (_changed(specforge, architectures=["Eagle3DeepseekV2ForCausalLM"]), "with MLA", "EAGLE3"),
}
"""Form -> its program, and words of the reason and of the hint."""
