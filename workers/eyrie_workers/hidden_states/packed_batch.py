"""The batch type that readers of hidden states return and training consumes: documents end to end, without padding.

`FeatureStore.read`, `StreamedFeatures.read` and the objectives of all drafter families exchange this one type, so no
conversion lies between the store and the optimizer. Tokens and loss mask begin on the CPU, where a step is planned; the
states begin where they were read or computed.

    T packed tokens, A aux layers, H hidden
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyrie_workers.hidden_states.shard_format import TopKLogits


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end, decoded."""

    token_ids: Tensor
    """[T] int64."""

    loss_mask: Tensor
    """[T] bool."""

    aux: Tensor
    """[T, A, H]."""

    last: Tensor
    """[T, H], after the target's final norm; 0 at unsupervised positions; [T, 0] in a store of top-k logits."""

    lengths: tuple[int, ...]
    """Tokens of each document."""

    topk_logits: TopKLogits | None = None
    """At the supervised positions (`shard_format.supervised_positions` of each row), in a store of top-k logits."""

    def to(self, device: torch.device) -> "PackedBatch":
        return replace(self.with_states_on(device), token_ids=self.token_ids.to(device, non_blocking=True),
                       loss_mask=self.loss_mask.to(device, non_blocking=True))

    def with_states_on(self, device: torch.device) -> "PackedBatch":
        """This batch with its states on a device. Tokens and masks, from which steps are planned, stay on the CPU."""
        # From pinned memory a non-blocking copy overlaps with the host's work; from pageable memory it blocks.
        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return replace(self, aux=moved(self.aux), last=moved(self.last),
                       topk_logits=None if self.topk_logits is None else self.topk_logits.map(moved))

    def inputs(self) -> "PackedBatch":
        """What a drafter reads of this batch, without what it is compared with."""
        return replace(self, last=self.last[:, :0], topk_logits=None)

    def states(self) -> Iterator[Tensor]:
        yield from (self.aux, self.last)
        if self.topk_logits is not None:
            yield from vars(self.topk_logits).values()

    def with_layers(self, columns: Sequence[int]) -> "PackedBatch":
        """This batch with the aux layers at these positions of the A axis."""
        if list(columns) == list(range(self.aux.shape[1])):
            return self
        # A list as index would be copied to a GPU, for which the host waits.
        return replace(self, aux=torch.cat([self.aux[:, at:at + 1] for at in columns] or [self.aux[:, :0]], 1))
