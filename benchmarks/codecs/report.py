"""The report of the comparison of codecs (`benchmarks.codecs`)."""

from eyrie_api.contract.model import Frozen


class SeedResult(Frozen):
    """One drafter."""

    seed: int
    tau: float
    theoretical_speedup: float
    """On held-out captured rows of its own store."""

    train_s: float


class WayResult(Frozen):
    """One way to store."""

    name: str
    bytes_per_token: float
    """Of the store's files, everything included."""

    share_of_bfloat16: float
    """Of four plain bfloat16 states and 16 bytes of ids and masks per token: what SpecForge stores, before padding."""

    aux_error: dict[str, float]
    """By aux layer: root mean square over tokens of |decoded - x| / |x|."""

    aux_error_worst: float
    """The largest of any token and layer."""

    teacher_kl: float
    """Mean nats from the teacher that float32 states give to the one these give, over the draft vocabulary."""

    seeds: tuple[SeedResult, ...]
    tau: float
    tau_spread: float
    """Standard deviation over seeds."""

    lost: float
    """Mean over seeds of float32's tau less this one's; negative is a gain."""

    lost_spread: float
    within_seed_noise: bool


class CodecReport(Frozen):
    """The report of all codecs."""

    target: str
    conversations: int
    tokens: int
    answer_tokens: int
    prompts: int
    seed_spread: float
    hadamard_int4_error: float
    """What int4's error would be if states were rotated first; see `aux_error` of int4."""

    ways: tuple[WayResult, ...]
    seconds: float
    environment: dict[str, str]
