"""Bytes on a GPU and floating-point operations of one optimizer step of a drafter. Pure.

A step is described by its counts (`StepWork`): the trainer counts them in its plan of a batch, `expected_work`
estimates them before there is one.

**Operations.** Counted is what loss and gradient require: each matrix product once forward and twice backward (for its
input and for its weight), attention's two products once and twice, the teacher's forward only. Recomputation and
padding are not counted, so they lower MFU.

**Bytes.** What is allocated at the moment of most memory, in the code path of a GPU (`drafters.eagle3.drafter`,
`training.distributed`). There are a few such moments, and a step's need is the largest of them:

    unroll     in the MLP of the last step of a part, before the loss
    loss       at the end of the forward pass of the last part: everything saved for the backward pass, the teacher's
               table, and one chunk of logits with its gradient
    backward   in the MLP of step 0: the gradients of weights and shared projections exist, most activations are freed
    update     gradients of all parameters

Parameters, gradients, moments, the residual stream and norms are float32; matrices of the products and their results
are in the compute dtype (`StepSetting.compute_bytes`). What torch's allocator adds by rounding and fragmentation, the
CUDA context and the libraries' workspaces are not counted: `usable_bytes` leaves room for them.

    T packed tokens, R roots, S steps, N predictions of all steps, U rows of the teacher's table, A aux layers,
    H hidden, Q = q + 2 kv widths, I intermediate, D draft vocabulary, V vocabulary, P trainable parameters, W ranks
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from eyrie_api.contract.families import FAMILIES, DrafterSizes

_WIDE = 4
"""Bytes of float32: parameters, gradients, moments, the residual stream."""

_INDEX = 8
"""Bytes of int64."""

STREAMED = "streamed target"
"""Component of a step's bytes: see `streamed_bytes`."""

LOSS_CHUNK_ELEMENTS = 1 << 27
"""Logits that exist at a time in `eyrie_kernels.soft_target_loss`."""


@dataclass(frozen=True)
class StepWork:
    """What one rank computes of one batch."""

    tokens: int
    """T"""

    alive: tuple[int, ...]
    """[S] roots alive at each step: non-increasing, alive[0] = R."""

    teacher_rows: int
    """U: positions whose target distribution is computed."""

    visible_keys: int
    """Keys that queries attend to, summed over all queries of all steps."""

    @property
    def predictions(self) -> int:
        """N"""
        return sum(self.alive)


def expected_work(tokens: int, *, supervised_share: float, ttt_length: int, unrolled_fraction: float,
                  row_tokens: float) -> StepWork:
    """The counts of a batch that does not exist yet: every answer token a root, a share of them unrolled.

    row_tokens  mean length of a document.
    """
    roots = ceil(tokens * supervised_share)
    deep = ceil(roots * unrolled_fraction)
    alive = (roots, *(deep for _ in range(ttt_length - 1)))
    # Answers end their documents: a root sees on average all of the prompt and half of the answer.
    mean_keys = row_tokens * (1.0 - supervised_share / 2)
    visible = sum(round(count * (mean_keys + step)) for step, count in enumerate(alive))
    return StepWork(tokens, alive, roots, visible)


@dataclass(frozen=True)
class TrainedDrafter:
    """A drafter and what of its target training reads."""

    family: str
    sizes: DrafterSizes
    vocab_size: int
    tied: bool = False
    """Whether the target's output matrix is its embedding."""

    @property
    def parameters(self) -> int:
        """P, without norms and biases."""
        return FAMILIES[self.family].parameters(self.sizes)

    def drafting_weights(self, num_steps: int) -> int:
        """Weights that drafting a chain of so many tokens reads."""
        of_family = FAMILIES[self.family].drafting_weights
        return num_steps * self.parameters if of_family is None else of_family(self.sizes, num_steps)

    @property
    def inner(self) -> int:
        """I"""
        return self.sizes.intermediate_size or self.sizes.target.intermediate_size

    @property
    def query_width(self) -> int:
        """q"""
        return self.sizes.target.num_heads * self.sizes.target.head_dim

    @property
    def key_width(self) -> int:
        """kv"""
        return self.sizes.target.num_kv_heads * self.sizes.target.head_dim


@dataclass(frozen=True)
class StepSetting:
    compute_bytes: int = 2
    """Of an element of the matrix products: 2 in bfloat16, 4 in float32."""

    target_bytes: int = 2
    """Of an element of the target's matrices."""

    state_bytes: int = 2
    """Of an element of the batch's hidden states."""

    num_parts: int = 1
    """Parts that the roots are unrolled in, one after the other."""

    num_ranks: int = 1
    recompute: bool = False
    """train.grad_checkpoint"""

    top_k: int | None = None
    """Stored top-k logits instead of final states: the teacher's table stays sparse."""

    accumulating: bool = False
    """Whether gradients of an earlier micro-batch exist during the forward pass."""

    streamed_bytes: int = 0
    """Of the target that computes the states on the same GPU (`capture.mode: stream`), as `streamed_bytes` has it."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes by component at the moment of most memory."""

    moment: str
    """unroll, loss, backward or update."""

    components: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.components.values())

    @property
    def largest(self) -> str:
        return max(self.components, key=lambda name: self.components[name])


# --- operations ----------------------------------------------------------------------------------------------------


def eagle3_flops(drafter: TrainedDrafter, work: StepWork) -> int:
    """Operations of one EAGLE-3 step, forward and backward, without the optimizer's own."""
    hidden, q, kv = drafter.sizes.target.hidden_size, drafter.query_width, drafter.key_width
    fused = drafter.sizes.num_aux_layers * hidden
    once = work.tokens * hidden * (2 * fused + 3 * 2 * kv)  # fc needs no gradient of its input
    token_half = 3 * work.tokens * hidden * (q + 2 * kv)
    per_root = 3 * (q * hidden + 3 * hidden * drafter.inner + hidden * drafter.sizes.output_vocab_size)
    unrolled = (work.predictions * (per_root + 3 * q * hidden)
                + 3 * (work.predictions - work.alive[0]) * hidden * 2 * kv)
    attention, teacher = 3 * 2 * work.visible_keys * q, work.teacher_rows * hidden * drafter.vocab_size
    return 2 * (once + token_half + unrolled + attention + teacher)


# --- bytes ---------------------------------------------------------------------------------------------------------


def step_bytes(drafter: TrainedDrafter, work: StepWork, setting: StepSetting) -> StepBytes:
    """The need of one step of an EAGLE-3 drafter on one rank, at the moment of most memory."""
    # The largest of parts of nearly equal numbers of roots.
    part = replace(work, alive=tuple(-(-alive // setting.num_parts) for alive in work.alive))
    held = _always(drafter, setting) | _shared(drafter, work, setting)
    if setting.num_parts > 1:  # gradients of the shared projections and weights are summed over parts in float32
        held["sums over parts"] = _WIDE * (work.tokens * sum(_shared_widths(drafter)) + _unrolled_weights(drafter))
    row = drafter.sizes.output_vocab_size * _WIDE if setting.top_k is None else setting.top_k * (_INDEX + 2)
    teacher = {"teacher table": work.teacher_rows * (row + _WIDE + _INDEX + 1)}
    # The token's share of q, k, v and those of step 0, until every root has gathered its rows.
    projections = {"projections by token": work.tokens * setting.compute_bytes * 2 * (
        drafter.query_width + 2 * drafter.key_width)}
    between = projections | teacher if setting.num_parts > 1 else {}  # later parts read both again
    # In the MLP of the last step q, k and v of every later step still exist, and the states are not joined yet.
    hidden, narrow = drafter.sizes.target.hidden_size, setting.compute_bytes
    kept = sum(alive * (_kept(drafter, step, setting) - hidden * _WIDE) for step, alive in enumerate(part.alive))
    own = (part.predictions - part.alive[0]) * (drafter.query_width + 3 * drafter.key_width) * narrow
    moments = {
        "unroll": held | projections | teacher | {
            "activations": kept, "own keys and values": own,
            "step": part.alive[-1] * (drafter.inner + hidden) * narrow},
        "loss": held | between | teacher | _at_loss(drafter, work, part, setting),
        "backward": held | between | _at_backward(drafter, work, part, setting),
        "update": _always(drafter, setting) | {"gradients": _WIDE * drafter.parameters}}
    needs = (StepBytes(moment, {name: size for name, size in components.items() if size})
             for moment, components in moments.items())
    return max(needs, key=lambda need: need.total)


def _always(drafter: TrainedDrafter, setting: StepSetting) -> dict[str, int]:
    """What exists before and after every step."""
    hidden, q, kv, inner = (drafter.sizes.target.hidden_size, drafter.query_width, drafter.key_width, drafter.inner)
    # Without norms. Whole parameters are distributed, the largest first, each to the rank with the fewest elements
    # (torch's ZeroRedundancyOptimizer): counted are the moments of the fullest rank.
    loads = [0] * setting.num_ranks
    for size in sorted((drafter.sizes.num_aux_layers * hidden**2, 2 * hidden * q, 2 * hidden * kv, 2 * hidden * kv,
                        q * hidden, hidden * inner, hidden * inner, hidden * inner,
                        drafter.sizes.output_vocab_size * hidden), reverse=True):
        loads[loads.index(min(loads))] += size
    matrices = 1 if drafter.tied else 2
    return {"parameters": _WIDE * drafter.parameters,
            "moments": 2 * _WIDE * max(loads),
            "target embedding and head": matrices * drafter.vocab_size * drafter.sizes.target.hidden_size
                                         * setting.target_bytes,
            "gradients": _WIDE * drafter.parameters if setting.accumulating else 0,
            STREAMED: setting.streamed_bytes}


def _shared(drafter: TrainedDrafter, work: StepWork, setting: StepSetting) -> dict[str, int]:
    """Compute copies of the weights, the batch's states, and what all roots of a batch share (one row per token)."""
    hidden, kv = drafter.sizes.target.hidden_size, drafter.key_width
    wide_q = drafter.query_width + 2 * kv
    # In float32 only matrices that are joined are copied: the halves of q, k, v, and gate with up.
    copied = (drafter.parameters if setting.compute_bytes < _WIDE
              else 2 * hidden * wide_q + 2 * hidden * drafter.inner)
    states = work.tokens * drafter.sizes.num_aux_layers * hidden
    # A product saves its input in the compute dtype: the states themselves, or a copy, next to which parts keep them.
    copied_states = setting.num_parts > 1 and setting.state_bytes != setting.compute_bytes
    batch = states * (setting.compute_bytes + (setting.state_bytes if copied_states else 0))
    row = 2 * _WIDE * hidden + kv * setting.compute_bytes + _WIDE * drafter.sizes.target.head_dim + 4 * _INDEX
    # The kernel of attention reads contiguous values; those of step 0 are a view, copied at every step.
    copies = sum(alive > 0 for alive in work.alive) * kv * setting.compute_bytes
    return {"compute copies of weights": copied * setting.compute_bytes, "batch states": batch,
            "shared projections": work.tokens * (row + copies)}


def _kept(drafter: TrainedDrafter, step: int, setting: StepSetting) -> int:
    """What one root's step keeps for the backward pass: the residual stream before and after attention, [g u] of the
    MLP, rotated queries, attention's result and its log-sum-exp; the residual stream normed for the output matrix,
    twice. From step 1 on all own keys and values."""
    target, b = drafter.sizes.target, setting.compute_bytes
    q, kv = drafter.query_width, drafter.key_width
    wide = (4 * target.hidden_size + target.num_heads + target.head_dim + 3) * _WIDE
    own = 2 * kv * step * b  # those of earlier steps are stacked again at each step
    gated = 0 if setting.recompute else 2 * drafter.inner * b
    return wide + 2 * q * b + gated + own


def _at_loss(drafter: TrainedDrafter, work: StepWork, part: StepWork, setting: StepSetting) -> dict[str, int]:
    """At the last chunk of the loss."""
    hidden, vocab, b = drafter.sizes.target.hidden_size, drafter.sizes.output_vocab_size, setting.compute_bytes
    kept = sum(alive * _kept(drafter, step, setting) for step, alive in enumerate(part.alive))
    rows = min(part.predictions, max(64, LOSS_CHUNK_ELEMENTS // vocab // 32 * 32))
    narrow = b < _WIDE
    # Logits and, in a narrow dtype, their gradient next to them; the chunk's inputs and gradients of the states.
    chunk = rows * vocab * (_WIDE + (b if narrow else 0) + (_WIDE if setting.top_k is not None else 0))
    chunk += max(rows * hidden * (_WIDE + (2 * b if narrow else 0)), vocab * hidden * _WIDE)
    indices = work.predictions * (4 * _INDEX + 3 * _WIDE)
    return {"activations": kept, "states' gradients": part.predictions * hidden * _WIDE,
            "output matrix's gradient": vocab * hidden * _WIDE, "loss chunk": chunk, "prediction indices": indices}


def _unrolled_weights(drafter: TrainedDrafter) -> int:
    """Elements of the matrices that every step uses: all but fc and the token's half of q, k, v."""
    hidden = drafter.sizes.target.hidden_size
    once = hidden * (drafter.sizes.num_aux_layers * hidden + drafter.query_width + 2 * drafter.key_width)
    return drafter.parameters - once


def _shared_widths(drafter: TrainedDrafter) -> tuple[int, int]:
    """Elements per token of the shared projections: in float32, and in the compute dtype."""
    return drafter.sizes.target.hidden_size, 2 * drafter.query_width + 4 * drafter.key_width


def _at_backward(drafter: TrainedDrafter, work: StepWork, part: StepWork, setting: StepSetting) -> dict[str, int]:
    """In the backward pass of the MLP of the step at which most is allocated."""
    b, hidden, inner = setting.compute_bytes, drafter.sizes.target.hidden_size, drafter.inner
    wide, narrow = _shared_widths(drafter)
    steps: list[dict[str, int]] = []
    kept = 0
    for step, alive in enumerate(part.alive):
        kept += alive * (_kept(drafter, step, setting) - 2 * hidden * _WIDE)  # the normed states are freed
        # Gradients of the activations, and the weights' share of this step next to their sums so far.
        width = (3 * inner + 2 * hidden + (2 * inner if setting.recompute else 0)) * b + 4 * hidden * _WIDE
        fresh = 3 * hidden * inner * b
        sums = _unrolled_weights(drafter) * b + work.tokens * (wide * _WIDE + narrow * b)
        last = step == len(part.alive) - 1
        steps.append({"activations": kept, "states' gradients": part.predictions * hidden * _WIDE,
                      "gradients of activations": alive * width,
                      "gradients of a part": fresh + (0 if last and step else sums)})
    return max(steps, key=lambda components: sum(components.values()))


def streamed_bytes(drafter: TrainedDrafter, weight_bytes: int, element_bytes: int, num_states: int, pass_tokens: int,
                   buffer_bytes: int) -> int:
    """What `capture.mode: stream` takes next to the drafter at most: the target's weights, one of its passes with the
    `num_states` states that it returns of each token, and the states that are held, the batch in use included."""
    target = drafter.sizes.target
    # A pass also has the residual stream before and after a layer, its normed values, and the layer's widest part.
    layer = 3 * target.hidden_size + max(3 * target.intermediate_size, 2 * (drafter.query_width + drafter.key_width))
    return weight_bytes + pass_tokens * (num_states * target.hidden_size + layer) * element_bytes + buffer_bytes


# --- what fits -----------------------------------------------------------------------------------------------------

ACTIVATION_SHARE = 4
"""A part's activations may take this fraction (one over it) of a GPU's memory: `drafters.eagle3.drafter`."""

_FEWEST_ROOTS = 32
_MARGIN_SHARE, _CONTEXT_BYTES = 0.08, 1 << 30
_TOKEN_GRAIN = 256


def usable_bytes(device_bytes: int) -> int:
    """What tensors may take of a device: less 1 GiB for the CUDA context and the libraries' workspaces, and less 8 %
    for rounding and fragmentation of torch's allocator. Both are assumptions, not measurements."""
    return max(0, int(device_bytes * (1 - _MARGIN_SHARE)) - _CONTEXT_BYTES)


def mean_root_bytes(drafter: TrainedDrafter, alive: Sequence[int], setting: StepSetting) -> int:
    """What the forward pass keeps of a root, in the mean over all; `alive` as in `StepWork`."""
    kept = sum(count * _kept(drafter, step, setting) for step, count in enumerate(alive))
    return max(1, -(-kept // max(1, alive[0])))


def roots_per_part(budget_bytes: int, bytes_per_root: int) -> int:
    """The most roots whose activations fit the budget: a multiple of 32, at least 32."""
    return max(_FEWEST_ROOTS, budget_bytes // bytes_per_root // _FEWEST_ROOTS * _FEWEST_ROOTS)


def needed_bytes(drafter: TrainedDrafter, work: StepWork, setting: StepSetting, device_bytes: int) -> StepBytes:
    """The need of a step on a GPU of this size, in as many parts as it unrolls the batch in."""
    roots = roots_per_part(device_bytes // ACTIVATION_SHARE, mean_root_bytes(drafter, work.alive, setting))
    return step_bytes(drafter, work, replace(setting, num_parts=max(1, ceil(work.alive[0] / roots))))


def largest_tokens(drafter: TrainedDrafter, work_of: Callable[[int], StepWork], setting: StepSetting,
                   device_bytes: int) -> int:
    """The most tokens per step and rank that fit a GPU, a multiple of 256; 0 if none do.

    work_of  the counts of a batch of so many tokens.
    """

    def fits(number: int) -> bool:
        needed = needed_bytes(drafter, work_of(number * _TOKEN_GRAIN), setting, device_bytes)
        return needed.total <= usable_bytes(device_bytes)

    # Invariant: `low` fits or is 0, `high` does not fit.
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _TOKEN_GRAIN
