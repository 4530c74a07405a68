"""Olmo 2 and Olmo 3 in SGLang, with the hidden states an EAGLE-3 drafter reads.

SGLang 0.5.23 serves both with its class `Olmo2ForCausalLM` and cannot draft for them: the class has no
`set_eagle3_layers_to_capture`, returns no hidden states of layers between, and does not hand out the embedding and head
that a drafter shares. This subclass adds the three and changes nothing else; without drafting the stock forward runs.
It must bear the stock name: SGLang finds model classes by the name that its own Olmo 3 configuration writes.

Layer ids are SGLang's: v means the output of layer v, which is captured as the input of layer v + 1. Olmo normalises
behind attention and MLP and adds out of place, so a layer's input is the residual stream itself, whole, and stays as it
was.
"""

# T tokens of the batch, H hidden

from sglang.srt.models import olmo2 as stock
from torch import Tensor, no_grad


class Olmo2ForCausalLM(stock.Olmo2ForCausalLM):
    """The stock model, able to hand out inputs of its layers."""

    captured: tuple[int, ...] = ()
    """Layers whose inputs are handed out, ascending; empty while nothing drafts."""

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """Choose the layers; None chooses what SGLang's other models choose: low, middle and high."""
        num_layers = self.config.num_hidden_layers
        chosen = [2, num_layers // 2, num_layers - 3] if layer_ids is None else [value + 1 for value in layer_ids]
        beyond = [layer for layer in chosen if not 0 <= layer < num_layers]
        if beyond or sorted(set(chosen)) != chosen:
            raise ValueError(f"eagle_aux_hidden_state_layer_ids {layer_ids}: the inputs of layers {chosen} are not "
                             f"distinct, ascending and among the {num_layers} layers of this model")
        self.captured = tuple(chosen)

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """Weights a drafter shares."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    @no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: object,
                input_embeds: Tensor | None = None) -> object:
        """Logits, and with them [T, H] per captured layer."""
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
