"""Olmo 2 and Olmo 3 in SGLang, with the hidden states an EAGLE-3 drafter reads.

SGLang 0.5.23 serves both with its class `Olmo2ForCausalLM` and cannot draft for them: the class has no
`set_eagle3_layers_to_capture`, returns no hidden states of intermediate layers, and does not expose the embedding and
head that a drafter shares. This subclass adds the three and changes nothing else; without drafting the stock forward
runs. It must have the stock name, because SGLang's own Olmo 3 configuration refers to the class by that name.

Layer ids are SGLang's: v means the output of layer v, which is captured as the input of layer v + 1. Olmo normalises
after attention and MLP and does not add in place, so a layer's input is the complete residual stream and is not
modified later.
"""

# T tokens of the batch, H hidden

from sglang.srt.models import olmo2 as stock
from torch import Tensor, no_grad


class Olmo2ForCausalLM(stock.Olmo2ForCausalLM):
    """The stock model, which can also return the inputs of selected layers."""

    captured: tuple[int, ...] = ()
    """Layers whose inputs are returned, ascending; empty without a drafter."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """Select the layers; None selects low, middle and high ones like SGLang's other models."""
        num_layers = self.config.num_hidden_layers
        chosen = [2, num_layers // 2, num_layers - 3] if layer_ids is None else [value + 1 for value in layer_ids]
        beyond = [layer for layer in chosen if not 0 <= layer < num_layers]
        if beyond or sorted(set(chosen)) != chosen:
            raise ValueError(f"eagle_aux_hidden_state_layer_ids {layer_ids}: the inputs of layers {chosen} are not "
                             f"distinct, ascending and among the {num_layers} layers of this model")
        self.captured = tuple(chosen)

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """The embedding and head weights, which the drafter shares."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    @no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: object,
                input_embeds: Tensor | None = None) -> object:
        """Logits, and the input [T, H] of each captured layer."""
        if not self.captured:
            return super().forward(input_ids, positions, forward_batch, input_embeds)
        x_TH = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        aux = []
        for index, layer in enumerate(self.model.layers):
            if index in self.captured:
                aux.append(x_TH)
            x_TH = layer(positions, x_TH, forward_batch)
        return self.logits_processor(input_ids, self.model.norm(x_TH), self.lm_head, forward_batch, aux)


EntryClass = Olmo2ForCausalLM
