"""The shape of a draft tree."""

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.model import Frozen


class DraftTreeShape(Frozen):
    """The shape of the draft tree of one round. top_k 1 is a chain, whose num_draft_tokens is num_steps + 1."""

    num_steps: int = Field(5, ge=1, le=16)
    """Drafter passes per round (depth)."""

    top_k: int = Field(1, ge=1, le=64)
    """Children kept per node."""

    num_draft_tokens: int = Field(6, ge=2, le=512)
    """Nodes sent to verification, root included."""

    static: bool = False
    """Use the same branching in every round, independent of the drafter's confidence (EAGLE-1); embedded engine
    only."""

    @model_validator(mode="after")
    def _possible(self) -> "DraftTreeShape":
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} does not fit a chain of num_steps "
                             f"{self.num_steps}: with top_k 1 it must be num_steps + 1 = {self.num_steps + 1}")
        most = 1 + self.top_k + (self.num_steps - 1) * self.top_k**2
        if self.num_draft_tokens > most:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} is more than a tree of num_steps "
                             f"{self.num_steps} and top_k {self.top_k} can have: at most {most}")
        if self.num_draft_tokens < self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} cannot hold one path of num_steps "
                             f"{self.num_steps}: give at least {self.num_steps + 1} or lower num_steps")
        return self

    def label(self) -> str:
        """`num_steps/top_k/num_draft_tokens`, as usual in the literature."""
        return f"{self.num_steps}/{self.top_k}/{self.num_draft_tokens}" + ("/static" if self.static else "")
