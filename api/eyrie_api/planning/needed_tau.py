"""What would pay: the acceptance length tau that a drafter needs, by users and depth, before anything is trained. Pure.

A chain of `num_steps` drafted tokens emits tau tokens in the seconds of a round: one pass of the target over
num_steps + 1 tokens of each user, and the drafting. No drafter emits one token in the seconds of one pass over one
token of each user. The chain is `min_speedup` times as fast when

    tau >= round_s / budget_s,     budget_s = seconds of a token of each user without a drafter / min_speedup

and no tau is enough where that exceeds num_steps + 1 (`needed_tau`, which the tuner shares: it times its rounds and
counts the prefill in the budget, `measure.tuner.predict`).

A pass over n tokens reads the weights at the rate of one request, and computes each token after the first at the rate
of prefill; the two are added. The roofline (Williams et al. 2009) takes the longer of them alone, so a verified token
would cost nothing while the machine waits for memory; measured rounds of several users did not overlap them so well
(docs/results/tuner.md). With many users a token costs all of its arithmetic, and speculation loses. Of a mixture of
experts a pass reads those that its tokens draw, and all other weights once (`TargetFacts.read_parameters`). The rates
are those that the plan's hours rest on.

Not counted: the KV cache, the launch of kernels, sampling, and whatever else an engine does once per round. All of them
are larger shares of a small target's round: the tuner's figures, from timed rounds, replace these.
"""

from eyrie_api.contract.tuning import NeededTau
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.plan_work import PlannedWork, TargetFacts
from eyrie_api.planning.training_cost import TrainedDrafter

_USERS = (1, 4, 16, 64, 256)
"""In addition to the job's own loads, so that the plan shows where speculation loses."""


def needed_tau(num_steps: int, round_s: float, budget_s: float) -> float | None:
    """The tau at which rounds of so many seconds take at most `budget_s` for a token of each user; at least 1, the
    target's own token. None where a chain of `num_steps` cannot reach it."""
    if budget_s <= 0.0 or round_s > (num_steps + 1) * budget_s:
        return None
    return max(1.0, round_s / budget_s)


def plan_needed_tau(work: PlannedWork, rates: Rates) -> tuple[NeededTau, ...]:
    """For a drafter like the first candidate, on one server of these rates. Empty where nothing is trained."""
    if not work.job.candidates:
        return ()
    spec, target = work.spec, work.target
    drafter = work.drafter(work.job.candidates[0])

    def seconds(users: int, num_steps: int) -> float:
        return planned_round_s(target, drafter.drafting_weights(num_steps) if num_steps else 0, users, num_steps + 1,
                               rates)

    return tuple(NeededTau(users=users, num_steps=depth, tau=needed_tau(
        depth, seconds(users, depth), seconds(users, 0) / spec.promotion.min_speedup))
        for users in sorted({*_USERS, *spec.tune.concurrencies, *spec.prove.concurrencies})
        for depth in sorted({*spec.tune.num_steps}))


def planned_round_s(target: TargetFacts, drafting_weights: int, users: int, nodes: int, rates: Rates) -> float:
    """Seconds of a round: a pass over so many tokens of each user, and drafting with so many weights; 0: none."""
    drafting = pass_s(drafting_weights, drafting_weights, users, rates) if drafting_weights else 0.0
    tokens = users * nodes
    return pass_s(target.read_parameters(tokens), target.active_parameters, tokens, rates) + drafting


def planned_speedup(target: TargetFacts, drafter: TrainedDrafter, depth: int, tau: float, users: int,
                    rates: Rates) -> float:
    """Of chains of a depth with this tau, over no drafter."""
    return (tau * planned_round_s(target, 0, users, 1, rates)
            / planned_round_s(target, drafter.drafting_weights(depth), users, depth + 1, rates))


def pass_s(read: int, active: int, tokens: int, rates: Rates) -> float:
    """Seconds of a pass over so many tokens that reads so many weights; `active` weights compute each token."""
    return 2.0 * read / (rates.single * 1e9) + 2.0 * active * (tokens - 1) / (rates.prefill * 1e9)
