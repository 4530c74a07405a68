"""What no installation could run: checks of a submission, each a function whose name says what holds after it.

A target's files are checked by their headers and a data file by its first rows. The first problem refuses the job.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from eyrie_api.contract.families import BLOCK_ALGORITHMS, FAMILIES, VERIFICATIONS
from eyrie_api.contract.placement import PlacementRequest, S3Work
from eyrie_api.contract.targets import (
    ELEMENT_BYTES,
    HELD_OUT,
    QUICKSTART,
    QUICKSTART_SUITE_NAMES,
    SUPPORTED_ARCHITECTURES,
    is_hub_id,
)
from eyrie_api.data_files import is_remote
from eyrie_api.errors import InvalidInput, UnsupportedTarget, VocabularyTooLarge
from eyrie_api.planning.capacity import requests_of
from eyrie_api.planning.facts import gpu_names_here, gpus_of, is_missing, local_path
from eyrie_api.planning.hardware import GPUS, fewest_gpus, fitting_sizes, known_gpu, memory_of, undivided
from eyrie_api.planning.plan_work import LEAST_DRAFT_VOCABULARY, PlannedWork, TargetFacts, training_on_gpus
from eyrie_api.planning.published_drafters import check_published_drafters
from eyrie_api.planning.quantised import quantisation_config, read_quantisation
from eyrie_api.planning.resolve import block_chain
from eyrie_api.planning.sglang_attention import (
    PROFILES,
    choose_attention,
    draft_problem,
    labelled,
    needs_of,
    preferred,
)
from eyrie_api.planning.sglang_support import (
    SUPPORTED_BY_SGLANG,
    require_block_capture,
    require_capture,
    require_layer_outputs,
    require_quantisation,
    sglang_layer_ids,
)
from eyrie_api.planning.submission import Submission
from eyrie_api.planning.sweep import may_train_together
from eyrie_api.planning.target_config import check_config, computed_by_reference, language_model, logit_transform
from eyrie_api.planning.target_files import check_weights
from eyrie_api.planning.training_cost import usable_bytes
from eyrie_api.planning.training_defaults import gpu_bytes
from eyrie_api.quantities import amount, size

Check = Callable[[Submission], None]
"""Raises an error of `eyrie_api.errors` whose message names the field, its value and the rule."""


# Checks of the document.


def layers_are_distinct(submission: Submission) -> None:
    """Rules for aux_layers that hold for any target."""
    job = submission.job
    for field, layers in submission.layer_choices():
        if len(layers) < 2:
            raise InvalidInput(f"{field} {list(layers)} is one layer: SGLang treats a state of the "
                               "embedding's width as the drafter's own and skips its fc",
                               "give two or more, or omit it for a low, a middle and a high layer")
        if list(layers) != sorted(set(layers)):
            raise InvalidInput(f"{field} {list(layers)} are not distinct and ascending",
                               f"write {sorted(set(layers))}")
    named = job.spec.drafter.aux_layers
    if named is not None and not any(candidate.fuses for candidate in job.candidates):
        raise InvalidInput(f"drafter.aux_layers {list(named)} is set and no family of the job fuses layers",
                           "omit drafter.aux_layers, or train eagle3, dflash or dspark")


def windows_are_of_chains(submission: Submission) -> None:
    """SGLang applies a drafter's sliding window in chains only (`sglang_attention.attention_problem`)."""
    widest = max(submission.job.spec.tune.top_k)
    if submission.job.spec.engine.kind != "sglang" or widest == 1:
        return
    for candidate in submission.job.candidates:
        if candidate.drafter.sliding_window is not None:
            raise InvalidInput(
                f"drafter.sliding_window {candidate.drafter.sliding_window} (candidate {candidate.name}) with "
                f"tune.top_k up to {widest}: in a tree SGLang lets the drafter attend beyond its window",
                "set tune.top_k to [1], serve with the embedded engine, or omit drafter.sliding_window")


def blocks_are_chains_within_their_length(submission: Submission) -> None:
    """A drafter of blocks would be ranked by a draft that SGLang refuses, after it was trained. A continued drafter has
    the block that it was trained with, which is not known here."""
    job, tree = submission.job, submission.job.spec.benchmark.tree
    if job.spec.engine.kind != "sglang":
        return
    for candidate in job.candidates:
        if not FAMILIES[candidate.drafter.family].drafts_blocks or candidate.drafter.init_from is not None:
            continue
        chain = block_chain(candidate.drafter, candidate.train)
        if tree.top_k > 1 or tree.num_steps > chain.num_steps:
            raise InvalidInput(
                f"benchmark.tree is {tree.label()} and a drafter of family {candidate.drafter.family!r} has blocks of "
                f"{chain.num_draft_tokens} tokens (drafter.max_draft_tokens, by default train.ttt_length, and one "
                "more), of which SGLang drafts chains",
                f"set benchmark.tree to top_k 1 and num_steps up to {chain.num_steps}")


def drafters_of_the_target(submission: Submission) -> None:
    """Drafters, rivals, and drafters that training continues from, are of this target."""
    stored = None if submission.settings.artifacts.url is None else submission.settings.home.absolute() / "jobs"
    check_published_drafters(submission.job, submission.facts, stored)


def suites_exist(submission: Submission) -> None:
    """Files and names of benchmark suites, and that prompts are held out for those that use them."""
    spec, in_pods = submission.job.spec, submission.job.on_cluster
    for suite in spec.benchmark.suites:
        if suite.path == HELD_OUT:
            if spec.data.held_out_fraction == 0.0:
                raise InvalidInput(
                    f"benchmark suite {suite.name!r} uses held-out prompts, but data.held_out_fraction is 0",
                    "omit data.held_out_fraction or raise it, or omit the suite")
            continue
        kind, _, name = suite.path.partition(":")
        if kind == QUICKSTART:
            if name not in QUICKSTART_SUITE_NAMES:
                raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is not shipped with Eyrie",
                                   f"quickstart suites are {', '.join(QUICKSTART_SUITE_NAMES)}")
            continue
        if is_remote(suite.path) or (in_pods and is_missing(suite.path)):
            continue
        path = local_path(suite.path)
        if path is None and not is_hub_id(kind):  # before the split of `org/name:split`
            raise InvalidInput(f"benchmark suite {suite.name!r}: {suite.path!r} is neither a file here nor a Hub id",
                               "give a JSONL file, an s3:// or https:// URL, a Hub id, quickstart:<suite>, or held-out")
        if path is not None and not path.is_file():
            raise InvalidInput(f"benchmark suite {suite.name!r}: no file {suite.path!r} on the server",
                               "give a JSONL file of messages or prompt rows")


# Checks of the engine and the target.


def engine_can_compute(submission: Submission) -> None:
    """What SGLang refuses after it has loaded the weights, or serves differently with only a warning in its log. Limits
    of single launch lines, which depend on the GPU's generation, are in `eyrie_workers.sglang.launch`.

    On a CPU, SGLang 0.5.23 verifies drafts greedily whatever the temperature (`_verify_uses_greedy` in its source):
    output at a temperature above 0 would not be the target's. Sampled generation without a drafter is not affected, so
    regeneration may sample there."""
    job, architectures = submission.job, submission.architectures
    if job.spec.engine.kind != "sglang":
        return
    device = submission.facts.engine_device(job.gpus, job.serving_gpus)
    kernels = {("gpu", "float32"): "whose attention kernels on GPUs have no float32",
               ("cpu", "float16"): "whose CPU kernels compute in bfloat16"}.get((device, job.target.dtype))
    if kernels is not None:
        raise InvalidInput(f"target.dtype is {job.target.dtype!r} and engine is 'sglang', {kernels}",
                           "set target.dtype to 'bfloat16', or engine to 'embedded'")
    for name, section in (("benchmark", job.spec.benchmark), ("tune", job.spec.tune)):
        above = [value for value in section.temperatures if value > 0.0]
        if above and device == "cpu":
            raise InvalidInput(
                f"{name}.temperatures has {above[0]:g} and engine is 'sglang' on a CPU, which verifies drafts greedily "
                "only: drafted output at a temperature above 0 would not be the target's",
                f"set {name}.temperatures to [0], or engine to 'embedded'")
    if job.spec.drawn_drafts and device == "cpu":
        raise InvalidInput(f"tune.verifications or benchmark.tree.verification is {job.spec.drawn_drafts[0]!r} and "
                           "engine is 'sglang' on a CPU, which verifies greedily only", "omit both, or use GPUs")
    for family in job.families:
        algorithm = FAMILIES[family].sglang_algorithm
        for name in job.spec.drawn_drafts:
            if algorithm is not None and name not in VERIFICATIONS[algorithm]:
                raise InvalidInput(f"verification {name!r} and drafters of family {family!r}, whose drafts SGLang "
                                   f"verifies by {' or '.join(VERIFICATIONS[algorithm])}",
                                   "omit it from tune.verifications and benchmark.tree, or train another family")
        if algorithm in BLOCK_ALGORITHMS and device == "cpu":
            raise InvalidInput(
                f"drafters of family {family!r} and engine 'sglang' on a CPU: SGLang runs them on GPUs only",
                "train another family, or set engine to 'embedded'")
        if architectures and algorithm == "EAGLE3":
            require_capture(architectures[0])
        elif architectures and algorithm in BLOCK_ALGORITHMS:
            require_block_capture(architectures[0])


def attention_backend_serves(submission: Submission) -> None:
    """The attention backend that a job names serves its target and draft trees on GPUs that are known by name, else on
    any, and so do ways to compute the drafter; the stages apply the same rules to the machine that they find
    (`sglang_attention`)."""
    job, spec, facts = submission.job, submission.job.spec, submission.facts
    given = spec.engine.attention_backend
    if not facts.config or (given is None and not spec.draft_servings):
        return
    labels = gpu_names_here() if facts.profile is None else [
        *(placed.gpu_type for stage, placed in job.gpus.items() if stage != "train"), job.serving_gpus.gpu_type,
        *(measured.placement.gpu_type for measured in spec.prove.profiles)]
    known = [machine for label in dict.fromkeys(labels) if (machine := labelled(label)) is not None]
    if facts.engine_device(job.gpus, job.serving_gpus) == "cpu":
        known = [PROFILES["cpu"]]
    widths = {0, spec.benchmark.tree.top_k, *(spec.tune.top_k if "tune" in spec.stages else ())}
    windowed = any(candidate.drafter.sliding_window is not None for candidate in job.candidates)
    needs = replace(needs_of(facts.config), windowed_draft=max(widths) if windowed else 0)
    gpus = [machine for machine in PROFILES.values() if machine.platform != "cpu"]
    for family, draft in product(job.families, spec.draft_servings):
        if (algorithm := FAMILIES[family].sglang_algorithm) is not None:
            tree = draft == spec.benchmark.tree.draft and spec.benchmark.tree.top_k > 1
            problems = [draft_problem(machine, needs, draft, algorithm, tree, given) for machine in known or gpus]
            if wrong := [one for one in problems if one is not None and (known or None not in problems)]:
                raise InvalidInput(f"tune.drafts or benchmark.tree.draft: {wrong[0][0]}", wrong[0][1])
    if given is None:
        return
    if not known:  # any that it serves this target on, or none that it does
        known = [next((machine for machine in gpus if given in preferred(machine, needs)), gpus[0])]
    for machine in known:
        choose_attention(machine, needs, widths, given)


def target_is_computed(submission: Submission) -> None:
    """The engine computes the target's architecture as its config describes it, without code of the checkpoint."""
    spec, config, architectures = submission.job.spec, submission.facts.config, submission.architectures
    if submission.facts.target is None:
        return
    embedded = spec.engine.kind == "embedded"
    if not architectures or (embedded and not set(architectures) & set(SUPPORTED_ARCHITECTURES)):
        other_engine = "set engine to 'sglang', or " if set(architectures) & set(SUPPORTED_BY_SGLANG) else ""
        raise UnsupportedTarget(
            f"target.model {spec.target.model!r}: config.json names architecture "
            f"{', '.join(architectures) or '(none)'}, which the embedded engine does not compute",
            f"{other_engine}use a target of {', '.join(SUPPORTED_ARCHITECTURES)}")
    assert submission.facts.sizes is not None  # read here, so that a config without sizes is named first
    if embedded:
        check_config(config)


def heads_read_plain_logits(submission: Submission) -> None:
    """In SGLang LiLiCorr's head reads the logits without the target's factor or bound."""
    heads = {candidate.drafter.causal_head for candidate in submission.job.candidates}
    if "lilicorr" in heads and logit_transform(language_model(submission.facts.config)) != (1.0, None):
        raise InvalidInput("drafter.causal_head is 'lilicorr', and the target scales or bounds its logits: in SGLang "
                           "the head reads logits without either", "use another head")


def states_are_captured(submission: Submission) -> None:
    """The source of hidden states can record what the candidates read."""
    spec, facts = submission.job.spec, submission.facts
    if facts.sizes is None or not spec.trains:
        return
    source = submission.source
    if source == "sglang":
        if spec.engine.kind != "sglang":
            raise InvalidInput(f"capture.source 'sglang' with engine {spec.engine.kind!r}, which starts no such server",
                               "set engine to 'sglang', or omit capture.source")
        require_capture(submission.architectures[0])
        for field, layers in submission.layer_choices():
            require_layer_outputs(layers, field)
    if source != "reference" and spec.capture.probe_layers:
        raise InvalidInput(f"capture.probe_layers with a target that is captured through {source}: layers are probed "
                           "in the reference forward pass alone", "set capture.probe_layers to false")


def quantised_weights_are_computed(submission: Submission) -> None:
    """Whatever computes a quantised target can: Eyrie and transformers from its values, SGLang with its kernels."""
    spec, facts = submission.job.spec, submission.facts
    quantised = quantisation_config(facts.config)
    if facts.sizes is None or quantised is None:
        return
    method = quantised.get("quant_method")
    if spec.engine.kind == "sglang":
        require_quantisation(quantised)
        if facts.engine_device(submission.job.gpus, submission.job.serving_gpus) == "cpu":
            raise UnsupportedTarget(f"quantization_config: quant_method {method!r} and engine 'sglang' on a CPU, where "
                                    "its kernels for quantised weights need Intel's AMX and were never run",
                                    "set engine to 'embedded', give the unquantised model, or submit the job where "
                                    "there are GPUs")
    if submission.is_computed_here:
        read_quantisation(facts.config)


def target_files_are_whole(submission: Submission) -> None:
    """Weights and tokenizer. A Hub snapshot may be incomplete: the first stage downloads the rest."""
    facts, model = submission.facts, submission.job.spec.target.model
    if facts.target is None or facts.sizes is None:
        return
    if facts.config.get("auto_map"):
        raise UnsupportedTarget(
            f"target.model {model!r}: config.json names Python code (auto_map), which is not executed",
            f"remove auto_map if the model computes what {submission.architectures[0]} of transformers does")
    if submission.target_is_here:
        check_weights(facts.target, facts.config, facts.sizes, known=computed_by_reference(facts.config),
                      computed_here=submission.is_computed_here)
        _ = submission.target_warnings  # raises for what is no warning


def pods_fit_a_node(submission: Submission) -> None:
    """No server, and no pod of a cluster, has more GPUs than a node. Only training runs on several nodes."""
    job, spec, node_gpus = submission.job, submission.job.spec, submission.node_gpus
    wanted = [("engine.tp_size", spec.engine.tp_size)]
    if job.on_cluster:
        wanted += [(f"{field}.num_gpus", request.num_gpus or 0) for field, request in requests_of(spec)]
    for field, num_gpus in wanted:
        if num_gpus <= node_gpus:
            continue
        hint = f"give at most {node_gpus}" + (
            ", or correct cluster.node_gpus of the cluster" if job.on_cluster else "")
        device = memory_of(job.gpus["prove"].gpu_type)
        weights = submission.weight_bytes(spec.engine.kind)
        if field == "engine.tp_size" and device is not None and weights is not None and submission.facts.sizes:
            enough, instead = fewest_gpus(submission.facts.sizes, weights, device, node_gpus,
                                          spec.engine.sglang_arguments.mem_fraction_static)
            hint = instead or f"set it to {enough}, which hold the target"
        raise InvalidInput(f"{field} is {num_gpus} and one node has {node_gpus} GPUs: servers and pods are not divided "
                           "among nodes", hint)


def heads_are_divided(submission: Submission) -> None:
    """The GPUs of one server divide the target; each stage with servers and the endpoint of a cluster have as many. An
    engine takes all that its endpoint has."""
    job, spec, facts, profile = submission.job, submission.job.spec, submission.facts.sizes, submission.facts.profile
    tp_size, serving = spec.engine.tp_size, job.serving_gpus.num_gpus or 0
    without_servers = ("capture", "train", *(() if spec.regenerate.engine is None else ("regenerate",)))
    servers: list[tuple[str, int, str]] = [
        (stage, placed.num_gpus or 0, "placement.num_gpus") for stage, placed in job.gpus.items()
        if stage in spec.stages and stage not in without_servers]
    serves = profile is not None and profile.serving is not None and spec.promotion.mode != "never"
    if serves:
        servers.append(("the endpoint", serving, "serve.placement.num_gpus"))
    if facts is not None and spec.engine.kind == "sglang":
        check_divided(tp_size, facts)
        if serves and serving > tp_size:
            check_divided(serving, facts, "serve.placement.num_gpus")
    for place, num_gpus, field in servers:
        if 0 < num_gpus < tp_size:
            raise InvalidInput(f"engine.tp_size is {tp_size} and {place} has {num_gpus} GPUs ({field})",
                               f"give it {tp_size} or more, or lower engine.tp_size")


def check_divided(tp_size: int, facts: TargetFacts, field: str = "engine.tp_size") -> None:
    """Raises InvalidInput when so many GPUs cannot divide the target; `field` gives their number."""
    if (what := undivided(facts, tp_size)) is not None:
        sizes = ", ".join(map(str, fitting_sizes(facts)))
        raise InvalidInput(f"{field} {tp_size} does not divide {what}",
                           f"use a number that does: {sizes}" if sizes else "give the unquantised model")


def layers_have_sglang_ids(submission: Submission) -> None:
    """For every serving engine: a checkpoint's config.json names its layers as SGLang does, so they need such names."""
    if submission.facts.sizes is not None:
        for _, layers in submission.layer_choices():
            sglang_layer_ids(submission.architectures[0], submission.facts.sizes.num_layers, layers)


def vocabularies_fit(submission: Submission) -> None:
    """Draft vocabularies are no larger than the target's. A store of top-k logits has one draft vocabulary, which every
    drafter trained from it must use."""
    facts, capture = submission.facts.sizes, submission.job.spec.capture
    if facts is None:
        return
    # None: it follows from the answers.
    usual = facts.vocab_size if facts.vocab_size <= LEAST_DRAFT_VOCABULARY else None
    stored = capture.draft_vocab_size or usual
    for candidate in submission.job.candidates:
        wanted = candidate.drafter.draft_vocab_size
        if capture.final_state == "topk" and wanted not in (None, stored):
            raise InvalidInput(
                f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) with capture.final_state topk, which "
                f"stores logits over {stored or 'as many'} draft tokens{'' if stored else ' as the answers need'}",
                f"set capture.draft_vocab_size {wanted} and no other in the sweep, or capture.final_state keep")
        whole = (wanted or usual) == facts.vocab_size or FAMILIES[candidate.drafter.family].whole_vocabulary
        if submission.job.spec.drawn_drafts and not whole:
            raise InvalidInput(
                f"drafter.draft_vocab_size is {wanted or 'omitted'} (candidate {candidate.name}), and verification "
                f"{submission.job.spec.drawn_drafts[0]!r} (tune.verifications or benchmark.tree) needs drafts of the "
                "target's whole vocabulary", f"set drafter.draft_vocab_size to {facts.vocab_size}")
        if wanted is not None and wanted > facts.vocab_size:
            raise VocabularyTooLarge(f"drafter.draft_vocab_size {wanted} (candidate {candidate.name}) is larger than "
                                     f"the target's vocabulary of {facts.vocab_size}",
                                     f"give at most {facts.vocab_size}, or omit it")


# Checks of the hardware.


def hardware_profiles_exist(submission: Submission) -> None:
    """Each profile of `prove.hardware` is one that can be there, and the target fits it.

    On one machine a profile is a part of it: its GPUs, or threads of its CPU. On a cluster a profile names a type of
    GPU by the label of its nodes. Which nodes there are changes with the autoscaler, so a type without nodes is waited
    for; one that neither the table of GPUs nor the administrator's prices name is taken for a typing error, for which a
    job would wait without end."""
    spec, facts, prices = submission.job.spec, submission.facts.sizes, submission.settings.prices
    gpus, processors = gpus_of(os.environ), len(os.sched_getaffinity(0))
    for number, profile in enumerate(spec.prove.profiles):
        field, placed, label = f"prove.hardware.profiles.{number}", profile.placement, profile.placement.gpu_type
        num_gpus = placed.num_gpus or 0
        if submission.job.on_cluster:
            if label is not None and known_gpu(label) is None and label not in prices:
                known = ", ".join(sorted({*prices, *(gpu.name for gpu in GPUS)}))
                raise InvalidInput(f"{field}.placement.gpu_type {label!r} is not a known type of GPU",
                                   f"known are labels that name one of {known}; an administrator adds others to "
                                   "EYRIE_GPU_HOUR_PRICES")
        else:
            named = [name for name, default in PlacementRequest() if name != "num_gpus"
                     and getattr(placed, name) != default]
            if named:
                raise InvalidInput(
                    f"{field}.placement.{named[0]} is set and this server runs jobs on one machine, which has no nodes "
                    "to choose from", "name num_gpus or threads, or submit the job to a cluster")
            if num_gpus > len(gpus):
                raise InvalidInput(f"{field}.placement.num_gpus is {num_gpus} and this machine has {len(gpus)} GPUs",
                                   "lower it, or submit the job to a cluster")
            if (profile.threads or 0) > processors:
                raise InvalidInput(
                    f"{field}.threads is {profile.threads} and this machine has {processors} processors", "lower it")
        if facts is None or not num_gpus:
            continue
        if spec.engine.kind == "sglang":
            check_divided(num_gpus, facts, f"{field}.placement.num_gpus")
        device, weights = gpu_bytes(label), facts.parameters * ELEMENT_BYTES[submission.job.target.dtype]
        if quantisation_config(submission.facts.config) is not None:
            weights = submission.weight_bytes(spec.engine.kind) or 0
        if device is not None and weights > num_gpus * usable_bytes(device):
            raise InvalidInput(f"{field}: the target's weights are {weights / 1e9:.0f} GB, and {num_gpus} x {label} "
                               f"hold {num_gpus * usable_bytes(device) / 1e9:.0f} GB",
                               "raise placement.num_gpus of the profile, or name a larger GPU")


def shards_fit_the_pod(submission: Submission) -> None:
    """Two shards of each process of capture fit the pod's work area: Kubernetes evicts a pod that exceeds it. Of
    `ranged` states alone; `copied` ones need room for all of them."""
    profile, capture = submission.facts.profile, submission.job.spec.capture
    work, shard = None if profile is None else profile.stages.work, capture.shard_size_bytes
    if (not isinstance(work, S3Work) or work.states != "ranged" or work.scratch_size is None
            or capture.mode == "stream"):
        return
    scratch = int(amount(work.scratch_size) or 0)
    processes = submission.job.num_processes("capture")
    if 2 * processes * shard > scratch:
        raise InvalidInput(
            f"capture.shard_size_bytes = {shard}: two shards of each of {processes} processes are "
            f"{size(2 * processes * shard)}, and the work area of a pod has {work.scratch_size}",
            f"give at most {scratch // (2 * processes)}, or fewer GPUs to capture; an administrator changes "
            "cluster.stages.work.scratch_size")


def training_steps_fit(submission: Submission) -> None:
    """A training step of every candidate fits the requested type of GPU, if its label names a size."""
    job, facts = submission.job, submission.facts
    label = job.gpus["train"].gpu_type
    device = gpu_bytes(label)
    if facts.sizes is None or label is None or device is None:
        return
    work = PlannedWork(job, facts.sizes, facts.data)
    for candidate in job.candidates:
        training = training_on_gpus(work, candidate)
        if training is not None:
            if os.environ.get("EYRIE_TARGET_DEVICE") and not job.on_cluster:  # the target has devices of its own
                training = replace(training, streamed_bytes=0)
            training.require(device, label, usable_bytes(device))


def rungs_are_at_equal_steps(submission: Submission) -> None:
    """Candidates of a sweep that has rungs have no limit of time, which ends each at another step."""
    job, sweep = submission.job, submission.job.spec.sweep
    limited = [candidate for candidate in job.candidates if candidate.train.max_seconds is not None]
    if limited and sweep.rungs and len(job.candidates) > 1 and may_train_together(sweep):
        raise InvalidInput(
            f"train.max_seconds {limited[0].train.max_seconds} (candidate {limited[0].name}) with sweep.rungs "
            f"{list(sweep.rungs)}: rungs compare candidates at equal steps",
            "set sweep.rungs to [], or limit train.max_steps")


CHECKS: tuple[Check, ...] = (
    layers_are_distinct, windows_are_of_chains, engine_can_compute, target_is_computed, attention_backend_serves,
    heads_read_plain_logits, states_are_captured, quantised_weights_are_computed, target_files_are_whole,
    pods_fit_a_node, heads_are_divided, layers_have_sglang_ids, blocks_are_chains_within_their_length,
    drafters_of_the_target, suites_exist, hardware_profiles_exist, shards_fit_the_pod, vocabularies_fit,
    training_steps_fit, rungs_are_at_equal_steps)
"""In order: later ones assume what earlier ones have checked."""
