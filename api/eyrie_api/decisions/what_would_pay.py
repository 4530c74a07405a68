"""What would make speculation pay at loads where it does not. Pure.

At a load it is the tau that a chain needs (`TuneReport.needed_tau`) against the drafter's, of the depth at which they
are closest. Three things change that: a drafter that is accepted more (data), one that drafts at less cost (its
family), or fewer users at once (the load). Where no tau of any depth is enough, data is not among them.
"""

from collections.abc import Sequence

from eyrie_api.contract.reports import TuneReport


def what_would_pay(tuned: TuneReport, loads: Sequence[int], min_speedup: float) -> str:
    """One sentence per load, then what would change it; empty for a report without needed taus."""
    timed = sorted({row.users for row in tuned.needed_tau})
    if not timed or not loads:
        return ""
    sentences, reachable = [], False
    for users in loads:
        at = max((load for load in timed if load <= users), default=timed[0])
        where = f"with {at_once(users)}{'' if at == users else f' (timed at {at})'}"
        closest = min(((row.tau / tau, row.tau, tau, row.num_steps) for row in tuned.needed_tau
                       if row.users == at and row.tau is not None
                       and (tau := tuned.chain_tau(at, row.num_steps)[0]) is not None), default=None)
        if closest is None:
            deepest = max(row.num_steps for row in tuned.needed_tau)
            sentences.append(f"{where} no tau of a chain of up to {deepest} tokens is enough for {min_speedup:.2f}x")
            continue
        reachable = True
        short, needed, tau, depth = closest
        enough = "" if short > 1.0 else (", enough by the tuner's timed rounds: other costs of serving, such as the "
                                         "prefill of long prompts, take the gain")
        sentences.append(
            f"{where} a chain of {depth} needs tau {needed:.2f} for {min_speedup:.2f}x and has {tau:.2f}{enough}")
    changes = ["more data, or answers of the target to prompts like those served (a higher tau)"] * reachable
    changes.append("a family that drafts at less cost (a lower tau needed)")
    paying = [load for load in timed if load < min(loads) and any(
        row.tau is not None and (tuned.chain_tau(load, row.num_steps)[0] or 0.0) >= row.tau
        for row in tuned.needed_tau if row.users == load)]
    if paying:
        changes.append(f"fewer users: with {at_once(paying[-1])} its tau is enough")
    return f"{'; '.join(sentences)}. What would change it: {'; '.join(changes)}"


def at_once(users: float) -> str:
    return f"{users:g} user{'' if users == 1 else 's'} at once"
