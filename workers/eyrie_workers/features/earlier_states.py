"""States that earlier jobs have captured of the same rows (`reuse: auto`).

A state is a function of the target, the layers, the codec and the tokens up to its position. The first three are the
format of a store, so a store with another format is left out. The tokens and the loss mask of each row are compared: an
answer may have been generated again, or cut at another length.

What is copied is the encoded row, each block compared with its digest as it is read. An earlier job's states may be
removed while they are read (`eyrie storage --clean`): a row that cannot be read is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyrie_api.artifacts.store import StoreUnavailable
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_workers.features.shard_format import StoreFormat, TokenRow
from eyrie_workers.features.store import FeatureStore


@dataclass
class EarlierStates:
    """The stores of earlier jobs, by row."""

    _places: dict[str, list[tuple[FeatureStore, int]]] = field(default_factory=dict)
    num_unreadable: int = 0
    """Rows that a store has and that could not be read."""

    def add(self, store: FeatureStore, fmt: StoreFormat, wanted: set[str]) -> None:
        """Use a store for those of the wanted rows that it has. Raises ArtifactCorrupt when it has another format."""
        if store.format != fmt:
            names = [name for name in StoreFormat.model_fields if getattr(store.format, name) != getattr(fmt, name)]
            raise ArtifactCorrupt(f"the states in {store.backend.name} have another format ({', '.join(names)})")
        for index, row_id in enumerate(store.row_ids):
            if row_id in wanted:
                self._places.setdefault(row_id, []).append((store, index))

    def has_all(self, row_ids: Sequence[str]) -> bool:
        """Whether some store has each row, as far as ids tell."""
        return all(row_id in self._places for row_id in row_ids)

    def find(self, row: TokenRow) -> dict[str, Tensor] | None:
        """The encoded states of a row; None where no store has them of these tokens."""
        for store, index in self._places.get(row.row_id, ()):
            try:
                token_ids, loss_mask = store.tokens(index)
                if torch.equal(token_ids, row.token_ids) and torch.equal(loss_mask, row.loss_mask):
                    return store.encoded(index)
            except (ArtifactCorrupt, ArtifactMissing, StoreUnavailable, OSError):
                self.num_unreadable += 1
        return None
