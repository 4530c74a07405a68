"""Training by Eyrie, SpecForge 0.2.0 and speculators 0.9.0 compared on this machine's CPU: `make bench-peers`.

The same EAGLE-3 drafter (one layer, the same widths, draft vocabulary and TTT length, float32, the same threads) is
trained by each on the same captured states, each through its own documented path from stored states to a drafter, and
every drafter is then evaluated by one engine: Eyrie's, greedy, on the same held-out prompts. The peers run in
environments of their own (`environments/setup`), driven through their public classes (`drive_specforge`,
`drive_speculators`, whose docstrings list what cannot run on a CPU).

Two workloads:

- *mix*: rows of a realistic length mix of the quickstart target's answers (`workload`). SpecForge twice: captured in
  batches of 32, its script's default, which stores and trains padding; and one by one, which is undocumented and its
  best case. Eyrie twice: with its defaults, and with every supervised position unrolled for all seven steps.
- *full*: rows of 512 tokens, all supervised, hidden 512, intermediate 1536, vocabulary 16384, draft vocabulary 4096,
  random states: only arithmetic differs. Eyrie without its sampling of positions.

Runs alternate, round by round, each in a new process; a round is a seed. Reported are medians over rounds with the
smallest and the largest value. `DIFFERENCES` lists what differs between the programs. `--rates` sets the learning rate
of each.

    python -m benchmarks.peers.bench [--short] [--out .eyrie/bench/peers.json]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.experiments.fits import Counted, counted_of, tau
from benchmarks.peers import workload
from eyrie_api.contract.benchmark import QUICKSTART_SUITES, SuiteSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import RegenerateStage, TrainStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import EyrieError
from eyrie_api.planning.eagle3_rules import canonical_name
from eyrie_workers.data.rows import ROWS, AnsweredRow, read_rows
from eyrie_workers.data.suites import load_suite, select
from eyrie_workers.drafters.eagle3.drafter import Eagle3Drafter
from eyrie_workers.drafters.eagle3.family import save_drafter
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.machine import environment
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.targets.config import choose_aux_layers, read_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target, resolve, target_digest
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer
from tests.feature_rows import FeatureRow

HERE = Path(__file__).parent
TREE = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
TTT = 7
FULL = {"hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "vocab": 16384, "draft_vocab": 4096,
        "length": 512}
EYRIE, UNROLLED, SPECFORGE, UNPADDED, SPECULATORS = (
    "eyrie", "eyrie_unrolled", "specforge", "specforge_unpadded", "speculators")
BARS = (("real tokens per second, of SpecForge's", "real_tokens_per_s", 3.0, True),
        ("peak memory above imports, of SpecForge's", "peak_rss_above_imports_mb", 0.5, False),
        ("bytes stored per real token, of SpecForge's", "bytes_per_real_token", 0.2, False))
DIFFERENCES = (
    "SpecForge: its reference loss formula in place of its Triton kernel, sdpa attention, no torch.compile, no FSDP "
    "wrapping (one process); rows one by one, as its recipes; AdamW 0.9/0.999, cosine; loss averaged over all "
    "positions.",
    "SpecForge captures with SGLang on a GPU: its files are written by our driver from our target's states, padded by "
    "its collator; states of padding are zeros.",
    "speculators: sdpa attention, eager loss, no torch.compile (it compiles on CUDA alone), no loader processes, its "
    "training loop without its Trainer (which needs an accelerator); AdamW 0.9/0.999, linear; TTT 7, decay 0.8 and no "
    "norms around fc in place of its defaults 3, 1.0 and norms; its lm_head is the target's and frozen.",
    "speculators captures with vLLM: its files are written by our driver from our target's states.",
    "Both peers supervise by the mask of the token they read, one position from ours: as many positions, one apart.",
    "Eyrie holds out 5 % of the rows, packs up to 1024 tokens a step, and by default trains the first step "
    "alone in the first 45 % of optimizer steps and then unrolls a third of the positions for all seven "
    "(train.single_step_ratio, train.unrolled_fraction); eyrie_unrolled and the full workload unroll every one.",
    "Stored: SpecForge and speculators bfloat16 (their format), Eyrie int8 (its default codec).",
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round, fewer rows, epochs and prompts")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/peers.json"))
    parser.add_argument("--peers", type=Path, default=Path(".eyrie/peers"), help="directory of the peers' environments")
    parser.add_argument("--rounds", type=int, help="rounds, each a seed (default 3, short 1)")
    parser.add_argument("--rows", type=int, help="rows of the mix (default 96, short 32)")
    parser.add_argument("--epochs", type=int, help="epochs over the mix (default 4, short 1)")
    parser.add_argument("--prompts", type=int, help="prompts of each suite, for tau (default 12, short 4)")
    parser.add_argument("--full-steps", type=int, help="steps of the full workload (default 7, short 4)")
    parser.add_argument("--conversations", type=int, help="answered by the target (default 500, short 120)")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rates", default="eyrie=2e-3,specforge=1e-3,speculators=2e-3", help="learning rates")
    parser.add_argument("--only", default="", help="comma-separated names: run only these")
    options = parser.parse_args(argv)
    for name, full, short in (("rounds", 3, 1), ("rows", 96, 32), ("epochs", 4, 1), ("prompts", 12, 4),
                              ("full_steps", 7, 4), ("conversations", 500, 120)):
        if getattr(options, name) is None:
            setattr(options, name, short if options.short else full)
    options.rates = {name: float(rate) for name, rate in (pair.split("=") for pair in options.rates.split(","))}
    return options


@dataclass(frozen=True)
class Case:
    """What is trained on: the answers of a target, as rows, and the suites of the acceptance length."""

    target: TargetSpec
    data: DataSpec
    regenerate: RegenerateSpec
    suites: tuple[SuiteSpec, ...]
    draft_vocab: int
    rows: Callable[[Sequence[AnsweredRow]], list[workload.Row]]


def quickstart(num_rows: int, conversations: int) -> Case:
    """Rows of the length mix, of the shipped target's answers."""
    return Case(
        target=TargetSpec(model="quickstart"),
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=conversations),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32),
        suites=QUICKSTART_SUITES, draft_vocab=1536, rows=lambda answered: workload.mix(answered, num_rows, seed=0))


class Bench:
    """The working directories of the workloads, and the runs in them."""

    def __init__(self, options: argparse.Namespace, case: Case) -> None:
        self.options, self.case = options, case
        self.home: Path = options.out.with_suffix("").resolve()
        self.home.mkdir(parents=True, exist_ok=True)
        self.path = resolve(case.target)
        self.config = read_config(self.path)
        self.aux_layers = choose_aux_layers(self.config.num_layers, self.config.layer_types, None).aux_layers
        self.target: TargetModel = load_target(self.path)

    # The mix

    def make_mix(self, names: Sequence[str]) -> dict[str, Any]:
        """Create answers, rows, states, and every peer's files of them."""
        answers, room = self.home / "answers", self.home / "mix"
        finished = room / "mix.json"
        if finished.exists():
            return dict(json.loads(finished.read_text()))
        shutil.rmtree(room, ignore_errors=True)
        answers.mkdir(exist_ok=True)
        (answers / "spec.json").write_text(RegenerateStage(
            job_id="peers", target=self.case.target, data=self.case.data, regenerate=self.case.regenerate,
            exclude_prompts=tuple(suite.path for suite in self.case.suites)).model_dump_json())
        if run_program(RegenerateStage, regenerate, ["--spec", str(answers / "spec.json"), "--out",
                                                     str(answers / "manifest.json")]):
            raise SystemExit("regenerating the target's answers failed")
        rows = self.case.rows(list(read_rows(answers / ROWS)))
        features = workload.read_through(self.target, rows, self.aux_layers)
        workload.write_raw(features, room / "raw")
        workload.write_store(features, room / "eyrie", self.aux_layers, target_digest(self.path))
        workload.link_target(self.path, room / "target")
        peers = [name for name in names if not name.startswith(EYRIE)]
        self.write_peers_files(room, peers)
        described: dict[str, Any] = workload.describe(rows)
        described["bytes_per_real_token"] = {
            name: workload.size_bytes(room / name) / described["tokens"] for name in (EYRIE, *peers)}
        finished.write_text(json.dumps(described))
        return described

    def write_peers_files(self, room: Path, names: Sequence[str]) -> None:
        """Run each peer's own preparation."""
        for name in names:
            task = {"raw": str(room / "raw"), "store": str(room / name), "target": str(room / "target"),
                    "capture_batch": 1 if name == UNPADDED else 32}
            (room / f"{name}-prepare.json").write_text(json.dumps(task))
            self.drive(name, "prepare", room / f"{name}-prepare.json")

    def train_mix(self, name: str, seed: int, *, rate: float, epochs: float) -> dict[str, Any]:
        """Train once on the mix, in a process of its own; returns its cost."""
        return self.train(name, self.home / "mix", seed, rate=rate, epochs=epochs, draft_vocab=self.case.draft_vocab,
                          intermediate=self.config.intermediate_size, skip=2, aux_layers=self.aux_layers)

    def train(self, name: str, room: Path, seed: int, *, rate: float, epochs: float, draft_vocab: int,
              intermediate: int, skip: int, aux_layers: Sequence[int]) -> dict[str, Any]:
        """Train once in a process of its own; returns its cost."""
        out = room / f"train-{name}-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        task: dict[str, Any] = {
            "raw": str(room / "raw"), "target": str(room / "target"), "out": str(out), "seed": seed, "skip": skip,
            "store": str(room / name), "threads": self.options.threads, "epochs": epochs, "ttt": TTT,
            "draft_vocab": draft_vocab, "intermediate": intermediate, "learning_rate": rate, "warmup_ratio": 0.05,
            "train_batch": 1, "total_seq_len": workload.LONGEST if room.name == "mix" else FULL["length"],
            "aux_layers": list(aux_layers)}
        if name.startswith(EYRIE):
            task["spec"] = TrainStage(
                job_id="peers", candidate="c0", target=self.case.target, store_dir=str(room / EYRIE),
                drafter=DrafterSpec(draft_vocab_size=draft_vocab, intermediate_size=intermediate),
                train=TrainSpec(learning_rate=rate, epochs=epochs, num_checkpoints=1, seed=seed, dtype="float32",
                                max_tokens_per_batch=1024, threads=self.options.threads, ttt_length=TTT,
                                **({"unrolled_fraction": 1.0, "single_step_ratio": 0.0} if name == UNROLLED else {})),
            ).model_dump(mode="json")
        (out / "task.json").write_text(json.dumps(task))
        self.drive(name, "train", out / "task.json")
        spent: dict[str, Any] = json.loads((out / "spent.json").read_text())
        return spent

    def drive(self, name: str, verb: str, task: Path) -> None:
        """Run a driver in its environment."""
        if name.startswith(EYRIE):
            command = [sys.executable, "-m", "benchmarks.peers.drive_eyrie", "--task", str(task)]
        else:
            peer = name.split("_")[0]
            command = [str(self.options.peers / peer / "bin" / "python"), str(HERE / f"drive_{peer}.py"), verb,
                       "--task", str(task)]
        self.run(command, task.with_name(f"{name}-{verb}.log"))

    def run(self, command: Sequence[str], log: Path) -> str:
        """Run a process with the common number of threads; returns its standard output."""
        threads = str(self.options.threads)
        with log.open("w") as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False,
                                  env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                                                    "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n" + log.read_text()[-3000:])
        return done.stdout

    def judge(self, name: str, spent: dict[str, Any], requests: Sequence[Request]) -> list[Counted]:
        """What a trained drafter accepts in Eyrie's engine, prompt by prompt."""
        place = Path(spent["drafter"])
        if name == SPECULATORS:
            self.convert(place.with_name("saved"), place)
        engine = Engine(self.target, open_drafter(place, self.target), max_concurrency=16)
        return [counted_of(answer) for answer in engine.generate(requests, TREE)]

    def convert(self, saved: Path, place: Path) -> None:
        """Convert a speculators checkpoint to the format SGLang loads: other names for the same tensors."""
        tensors = {canonical_name(name): tensor.float() if tensor.is_floating_point() else tensor
                   for name, tensor in load_file(saved / "model.safetensors").items()}
        ids = tensors.pop("d2t") + torch.arange(self.case.draft_vocab)
        vocabulary = DraftVocabulary(ids, self.config.vocab_size)
        for name in ("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"):
            tensors.pop(name, None)
        ours = Eagle3Drafter(self.drafter_config(), vocabulary)
        ours.load_state_dict(tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, strict=True)
        save_drafter(place, ours)

    def drafter_config(self) -> Any:
        """Configuration of the drafter that all programs train on the mix."""
        from eyrie_workers.drafters.eagle3.drafter import Eagle3Config

        target = self.config
        return Eagle3Config(
            hidden_size=target.hidden_size, intermediate_size=target.intermediate_size, num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, vocab_size=target.vocab_size,
            draft_vocab_size=self.case.draft_vocab, aux_layers=self.aux_layers, rms_eps=target.rms_eps,
            rope=target.rope, max_position_embeddings=target.max_position_embeddings,
            eos_token_ids=target.eos_token_ids)

    def requests(self) -> list[Request]:
        """The held-out prompts of all suites, greedy."""
        tokenizer = ChatTokenizer(self.path)
        return [Request(id=f"{suite.name}/{prompt.id}",
                        prompt_ids=tokenizer.render(list(prompt.messages), list(prompt.tools) or None),
                        max_new_tokens=64, sampling=SamplingSpec(temperature=0.0), seed=0,
                        stop_ids=tuple(tokenizer.eos_ids))
                for suite in self.case.suites
                for prompt in select(load_suite(suite), 0, self.options.prompts)]

    # The full rows

    def make_full(self, names: Sequence[str]) -> None:
        """Create a target's embedding and output matrix and rows of states, both random."""
        room, hidden, vocab = self.home / "full", FULL["hidden"], FULL["vocab"]
        target = room / "target"
        target.mkdir(parents=True)
        torch.manual_seed(0)
        save_file({"model.embed_tokens.weight": torch.randn(vocab, hidden), "model.norm.weight": torch.ones(hidden),
                   "lm_head.weight": torch.randn(vocab, hidden) * 0.1}, target / "model.safetensors",
                  metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": vocab,
            "hidden_size": hidden, "intermediate_size": FULL["intermediate"], "num_hidden_layers": 16,
            "num_attention_heads": FULL["heads"], "num_key_value_heads": FULL["kv_heads"], "head_dim": 64,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
            "torch_dtype": "float32"}))
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(
            ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"), "model.safetensors")}))
        length = FULL["length"]
        workload.write_raw([
            FeatureRow(f"row-{number:05}", torch.randint(3, vocab, (length,)), torch.ones(length, dtype=torch.bool),
                       torch.randn(length, 3, hidden), torch.randn(length, hidden))
            for number in range(2 + self.options.full_steps)], room / "raw")
        self.write_peers_files(room, [name for name in names if name != EYRIE])

    def full(self, name: str, seed: int) -> dict[str, Any]:
        """Train once on full rows; returns its cost."""
        room = self.home / "full"
        if name != EYRIE:
            return self.train(name, room, seed, rate=self.options.rates[name.split("_")[0]], epochs=1.0,
                              draft_vocab=FULL["draft_vocab"], intermediate=FULL["intermediate"], skip=2,
                              aux_layers=(2, 8, 13))
        # Through a shell: a child's ru_maxrss starts from its parent's, and this process has held a target.
        text = self.run(["bash", "-c", '"$@"; exit $?', "-", sys.executable, "-m", "benchmarks.training_step",
                         "--threads", str(self.options.threads), "--iterations", str(self.options.full_steps)],
                        room / f"eyrie-{seed}.log")
        step = json.loads(text.strip().splitlines()[-1])
        return {"step_s": step["wall_s"], "step_cpu_s": step["cpu_s"],
                "peak_rss_above_imports_mb": step["peak_mb_above_imports"]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def gather(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The spread of every numeric figure over several runs."""
    names = [name for name, value in runs[0].items() if isinstance(value, int | float)]
    return {name: spread([run[name] for run in runs]) for name in names}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run both workloads; returns the report."""
    began = time.monotonic()
    torch.set_num_threads(options.threads)
    shutil.rmtree(options.out.with_suffix(""), ignore_errors=True)
    bench = Bench(options, quickstart(options.rows, options.conversations))
    names = [name for name in (EYRIE, SPECFORGE, SPECULATORS, UNROLLED, UNPADDED)
             if not options.only or name in options.only.split(",")]
    mix = bench.make_mix(names)
    print(f"mix: {json.dumps(mix)}", flush=True)
    requests = bench.requests()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(options.rounds):
        for name in names[seed % len(names):] + names[:seed % len(names)]:
            spent = bench.train_mix(name, seed, rate=options.rates[name.split("_")[0]], epochs=float(options.epochs))
            stored = mix["bytes_per_real_token"][EYRIE if name == UNROLLED else name]
            runs[name].append(spent | {"tau": tau(bench.judge(name, spent, requests)), "bytes_per_real_token": stored})
            shown = ("real_tokens_per_s", "cpu_s_per_real_token", "peak_rss_above_imports_mb", "tau", "loop_s")
            print(f"mix, round {seed}, {name}: " + ", ".join(f"{key} {runs[name][-1][key]:.4g}" for key in shown),
                  flush=True)
    full: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name in (EYRIE, SPECFORGE, SPECULATORS)}
    bench.make_full(list(full))
    for seed in range(options.rounds):
        for name in full:
            full[name].append(bench.full(name, seed))
            print(f"full, round {seed}, {name}: {full[name][-1]['step_s']:.3f} s, "
                  f"{full[name][-1]['step_cpu_s']:.3f} CPU-s a step", flush=True)
    return {**{name: gather(found) for name, found in runs.items()},
            "full": {name: gather(found) for name, found in full.items()}, "mix": mix, "full_shape": FULL,
            "settings": {"rounds": options.rounds, "rows": options.rows, "epochs": options.epochs,
                         "threads": options.threads, "learning_rates": options.rates, "ttt_length": TTT,
                         "draft_vocab_size": bench.case.draft_vocab, "dtype": "float32", "short": options.short,
                         "drafted": TREE.model_dump()},
            "versions": {"specforge": "0.2.0", "speculators": "0.9.0", "peers_torch": "2.13.0",
                         "peers_transformers": "5.8.1"},
            "differences": DIFFERENCES, "seconds": time.monotonic() - began,
            "environment": environment("float32").model_dump(mode="json")}


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{'mix':20} {'tokens/s':>18} {'CPU ms/token':>13} {'above imports MB':>17} {'in all MB':>10} "
             f"{'bytes/token':>12} {'computed':>9} {'tau':>22}"]
    for name in (EYRIE, UNROLLED, SPECFORGE, UNPADDED, SPECULATORS):
        if name not in report:
            continue
        at: dict[str, dict[str, float]] = report[name]
        speed, tau = at["real_tokens_per_s"], at["tau"]
        lines.append(
            f"{name:20} {speed['median']:7.0f} ({speed['min']:.0f}-{speed['max']:.0f}) "
            f"{at['cpu_s_per_real_token']['median'] * 1e3:13.3f} {at['peak_rss_above_imports_mb']['median']:17.0f} "
            f"{at['peak_rss_mb']['median']:10.0f} {at['bytes_per_real_token']['median']:12.0f} "
            f"{at['computed_per_real_token']['median']:9.2f} "
            f"{tau['median']:7.3f} ({tau['min']:.3f}-{tau['max']:.3f})")
    lines.append(f"{'full rows':20} {'s/step':>18} {'CPU s/step':>13} {'above imports MB':>17}")
    for name, at in report["full"].items():
        lines.append(f"{name:20} {at['step_s']['median']:18.3f} {at['step_cpu_s']['median']:13.3f} "
                     f"{at['peak_rss_above_imports_mb']['median']:17.0f}")
    return "\n".join([*lines, *verdicts(report)])


def verdicts(report: dict[str, Any]) -> list[str]:
    """Each required ratio, the measured one, and whether it holds."""
    if not {EYRIE, SPECFORGE} <= report.keys():
        return []
    found = []
    for what, name, bar, at_least in BARS:
        for peer in (SPECFORGE, UNPADDED):
            if peer in report:
                ratio = report[EYRIE][name]["median"] / report[peer][name]["median"]
                held = ratio >= bar if at_least else ratio <= bar
                found.append(f"{'holds ' if held else 'MISSED'} {what} ({peer}): {ratio:.2f}, wanted "
                             f"{'at least' if at_least else 'at most'} {bar}")
    ours, theirs = report["full"][EYRIE]["step_s"]["median"], report["full"][SPECFORGE]["step_s"]["median"]
    found.append(f"{'holds ' if theirs / ours >= 1.3 else 'MISSED'} full rows, speed of SpecForge's: "
                 f"{theirs / ours:.2f}, wanted at least 1.3")
    taus, peers = report[EYRIE]["tau"], report[SPECFORGE]["tau"]
    noise = max(taus["max"] - taus["min"], peers["max"] - peers["min"])
    held = taus["median"] >= peers["median"] - noise
    found.append(f"{'holds ' if held else 'MISSED'} tau at least SpecForge's, within the spread of seeds "
                 f"({noise:.3f}): {taus['median']:.3f} and {peers['median']:.3f}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write and print; returns the exit code."""
    options = parse(argv)
    try:
        report = run(options)
    except EyrieError as error:
        print(f"error: {error.reason}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    print(f"{options.out}: {report['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
