"""The model-based campaign: `make campaign-model`. The real reconcilers against simulated worlds.

Each world is one seed: it interleaves steps of the control plane, kills in the middle of a step, and changes that the
control plane did not cause; then it does its part, and everything has to settle. A broken rule names the seed of its
world, which `--world SEED` plays again alone.

    python -m benchmarks.campaigns.model [--seed 1] [--seconds 60] [--out FILE] [--world SEED]
"""

import random
import sys
import time
from dataclasses import dataclass

from benchmarks.campaigns.model_plane import PlaneWorld, RuleBroken
from benchmarks.campaigns.model_resources import ResourceWorld
from benchmarks.campaigns.model_rollout import RolloutWorld
from benchmarks.campaigns.report import Campaign, options

WORLDS = (PlaneWorld, ResourceWorld, RolloutWorld)
STEPS = 120
"""Changes and steps per world before it settles."""


@dataclass
class Counts:
    """What was simulated."""

    worlds: int = 0
    steps: int = 0
    kills: int = 0
    busy_s: float = 0.0


def play(kind: type[PlaneWorld | ResourceWorld | RolloutWorld], seed: int, counts: Counts) -> None:
    """One world from its seed to its end. Raises RuleBroken, or what a reconciler raised."""
    began = time.process_time()
    rng = random.Random(f"{kind.__name__}/{seed}")
    world = kind(rng)
    try:
        for _ in range(STEPS):
            if rng.random() < 0.5:
                world.change()
            world.look()
            world.check()
        world.settle()
    finally:
        counts.worlds += 1
        counts.steps += world.steps
        counts.kills += world.kills
        counts.busy_s += time.process_time() - began


def run(campaign: Campaign, worlds: int | None = None) -> dict[str, Counts]:
    """Play worlds from the campaign's seed on until its time bound, or that many of each kind."""
    counted = {kind.__name__: Counts() for kind in WORLDS}
    number = 0
    while not campaign.is_over and (worlds is None or number < worlds):
        for kind in WORLDS:
            seed = campaign.seed + number
            try:
                play(kind, seed, counted[kind.__name__])
            except RuleBroken as broken:
                campaign.add_finding(str(broken).partition(":")[0], world=kind.__name__, seed=seed, facts=str(broken))
            except Exception as error:  # noqa: BLE001  # a reconciler must not raise, whatever it observes
                campaign.add_finding("a reconciler raised", world=kind.__name__, seed=seed, error=repr(error))
        number += 1
    return counted


def main() -> int:
    """Run the campaign."""
    parser = options("model", "Real reconcilers against simulated worlds.", 60.0)
    parser.add_argument("--world", type=int, help="play the worlds of this seed alone, with a traceback")
    wanted = parser.parse_args()
    if wanted.world is not None:
        for kind in WORLDS:
            play(kind, wanted.world, Counts())
        return 0
    campaign = Campaign("model", wanted.seed, wanted.seconds, wanted.out)
    counted = run(campaign)
    return campaign.finish({name: {"worlds": one.worlds, "steps": one.steps, "kills": one.kills,
                                   "steps_per_cpu_s": round(one.steps / max(one.busy_s, 1e-9))}
                            for name, one in counted.items()})


if __name__ == "__main__":
    sys.exit(main())
