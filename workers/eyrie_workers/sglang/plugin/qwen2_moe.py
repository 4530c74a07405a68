"""Qwen2-MoE in SGLang, with the embedding and head that an EAGLE drafter shares.

SGLang 0.5.23's class returns the hidden states that a drafter reads and has no `get_embed_and_head`, the only one of
the classes with the capture hook: a server with a drafter ends while it starts. This subclass adds the method.
"""

from sglang.srt.models import qwen2_moe as stock
from torch import Tensor


class Qwen2MoeForCausalLM(stock.Qwen2MoeForCausalLM):
    """The stock model."""

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """The embedding and head weights, which the drafter shares."""
        return self.model.embed_tokens.weight, self.lm_head.weight


EntryClass = Qwen2MoeForCausalLM
