"""What Eyrie says of `engine.tp_size` for checkpoints whose scales are of blocks, against the installed SGLang."""

import json
import os
import subprocess
from dataclasses import replace

from benchmarks.plans import LLAMA_8B, QWEN_235B, served_by_sglang
from eyrie_api.planning.hardware import undivided
from tests.sglang.servers import environment, sglang_python

ASK = """
import json, sys
from types import SimpleNamespace
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.model_executor.model_runner_components.moe_ep_setup import check_quantized_moe_compatibility

def accepted(case):
    tp, block, hidden = case["tp_size"], case["block"], case["hidden_size"]
    quant = SimpleNamespace(weight_block_size=block)
    layer = SimpleNamespace(tp_group=SimpleNamespace(world_size=tp))
    def linear(inputs, own_inputs, outputs, own_outputs):
        Fp8LinearMethod.validate_block_quant_shapes(
            layer, quant, inputs, own_inputs, outputs, sum(own_outputs), own_outputs)
    try:
        if case["experts"]:
            check_quantized_moe_compatibility(
                model_config=SimpleNamespace(
                    hf_config=SimpleNamespace(quantization_config={"weight_block_size": block}),
                    hf_text_config=SimpleNamespace(moe_intermediate_size=case["experts"])),
                tp_size=tp, moe_ep_size=1, moe_dp_size=1)
        else:
            width = case["intermediate_size"]
            linear(hidden, hidden, 2 * width, [width // tp] * 2)
            linear(width, width // tp, hidden, [hidden])
        queries, heads, head = case["num_heads"] * case["head_dim"], case["num_kv_heads"], case["head_dim"]
        keys = max(1, heads // tp) * head
        linear(hidden, hidden, queries + 2 * keys * tp, [queries // tp, keys, keys])
        linear(queries, queries // tp, hidden, [hidden])
    except ValueError:
        return False
    return True

print(json.dumps([accepted(case) for case in json.load(sys.stdin)]))
"""

IN_BLOCKS = replace(LLAMA_8B, block=(128, 128))
TARGETS = (served_by_sglang(QWEN_235B), IN_BLOCKS, replace(IN_BLOCKS, intermediate_size=14_400),
           replace(IN_BLOCKS, head_dim=64), replace(IN_BLOCKS, intermediate_size=12_288, num_kv_heads=4))
CASES = [(facts, size) for facts in TARGETS for size in (1, 2, 4, 8, 16, 32)]


def test_a_number_of_gpus_is_refused_where_sglang_refuses_it() -> None:
    asked = [{"tp_size": size, "block": facts.block, "hidden_size": facts.hidden_size, "head_dim": facts.head_dim,
              "experts": facts.experts and facts.experts.intermediate_size, "num_heads": facts.num_heads,
              "num_kv_heads": facts.num_kv_heads, "intermediate_size": facts.intermediate_size}
             for facts, size in CASES]
    done = subprocess.run([str(sglang_python()), "-c", ASK], input=json.dumps(asked), capture_output=True, text=True,
                          timeout=300, check=True, env=os.environ | environment())
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers == [undivided(facts, size) is None for facts, size in CASES]
    assert True in answers
    assert False in answers
