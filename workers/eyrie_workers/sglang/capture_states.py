"""Hidden states as the serving engine computes them: a managed SGLang server whose model package writes them to files.

Training then reads the layers that serving reads, by construction, at the speed of SGLang's prefill and with its tensor
parallelism. The texts of a pass are one request; each text's states arrive as files (`plugin.capture_export`) in a
directory in memory, which is read and deleted before the next pass, so that it never holds more than one pass.

A server that ends is started again, and the pass repeated; after `_MOST_RESTARTS` in a row the error is the stage's. A
pass whose states do not fit the memory that is free there becomes several requests.
"""

# M tokens of all texts, T tokens of one, A aux layers, H hidden

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from torch import Tensor

from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import DiskTooSmall
from eyrie_api.planning.sglang_support import require_layer_outputs, sglang_layer_ids
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.sglang.launch import CapturedStates
from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan, ServerPool
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.config import read_config, read_json
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.loading import resolve
from eyrie_workers.targets.operators import OutputHead

_NAME = "capture"  # of the single variant

_REQUEST = "eyrie-states-"  # plugin.capture_export.PREFIX, which cannot be imported outside SGLang's interpreter
_MOST_RESTARTS = 3
TOKENS_BEHIND_PROMPT = 8
"""That SGLang wants within the context: no longer row fits it."""

_FILE_BYTES = 2**16
"""Of one text's files besides its states: headers, and pages that are not full."""

_TIMEOUT_S = 3600.0
_IN_MEMORY = Path("/dev/shm")


class SglangStates:
    """Implements `targets.state_source.StateSource`; a context manager that stops the server."""

    device = CPU

    def __init__(self, plan: ServerPlan, aux_layers: Sequence[int], longest: int, directory: Path,
                 stage: Stage, history: ServerHistory | None = None) -> None:
        """A server that is started with the first pass.

        plan        of a server without a drafter
        aux_layers  `hidden_states` indices, ascending; the last of them may be the final state
        longest     tokens of the longest text
        directory   of the server's log
        history     where servers that ended, or did not answer, and were replaced are counted

        Raises InvalidInput for layers that SGLang cannot capture.
        """
        require_layer_outputs(aux_layers, "capture.aux_layers")
        target_dir = resolve(plan.target)
        self._config = read_config(target_dir)
        architecture = str(read_json(target_dir / "config.json")["architectures"][0])
        # Without any layer SGLang captures nothing: one in the middle where only the final state is read.
        self._inner = (tuple(layer for layer in aux_layers if layer < self._config.num_layers)
                       or (self._config.num_layers // 2,))
        # In memory where there is such a file system. The same at every start with the same directory, so that a start
        # removes what a killed process has left.
        place = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]
        self._files = _IN_MEMORY / f"eyrie-states-{place}" if _IN_MEMORY.is_dir() else directory / "states"
        ids = sglang_layer_ids(architecture, self._config.num_layers, self._inner)
        self._pool = ServerPool(
            replace(plan, captured=CapturedStates(ids, str(self._files))),
            {_NAME: DrafterUse(context_length=longest + TOKENS_BEHIND_PROMPT)}, directory, stage, history, capacity=1,
            beside_reference=False)
        self._target_dir, self._directory, self._stage = target_dir, directory, stage
        self._token_bytes = ((len(self._inner) + 1) * self._config.hidden_size * ELEMENT_BYTES[plan.target.dtype])
        self._passes = 0

    def __enter__(self) -> "SglangStates":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._pool.stop()
        shutil.rmtree(self._files, ignore_errors=True)

    @cached_property
    def output_head(self) -> OutputHead:
        """See `StateSource`; read from the checkpoint once, since every pass that stores top-k logits uses it."""
        return read_target_embeddings(self._target_dir, self._config.tie_word_embeddings).output_head

    def packed_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `StateSource`. Raises EngineFailed, and DiskTooSmall for a text whose states do not fit the memory."""
        texts, captured = [tokens.tolist() for tokens in token_ids_list], list[Tensor]()
        while len(captured) < len(texts):
            left = texts[len(captured):]
            self._files.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._files).free
            num = texts_that_fit([len(text) for text in left], self._token_bytes, free)
            if num == 0:
                raise DiskTooSmall(
                    f"the states of a text of {len(left[0])} tokens take {len(left[0]) * self._token_bytes} bytes and "
                    f"{free} are free in {self._files.parent}, through which SGLang hands them over",
                    "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory), or lower "
                    "capture.max_length")
            captured += self._repeated(left[:num])
        states = torch.cat(captured)
        columns = [len(self._inner) if layer == self._config.num_layers else self._inner.index(layer)
                   for layer in aux_layers]
        return states[:, columns], states[:, -1]

    def _repeated(self, texts: list[list[int]]) -> list[Tensor]:
        """`_pass`, again with another server where one has ended. Raises EngineFailed after too many."""
        for _ in range(_MOST_RESTARTS):
            try:
                return self._pass(texts)
            except EngineFailed as error:
                self._pool.stop()
                self._stage.pause_point()
                self._pool.note_end(_NAME, error.message)
        return self._pass(texts)

    def _pass(self, texts: list[list[int]]) -> list[Tensor]:
        """States [T, A + 1, H] of each text, the final one last."""
        if not self._pool.resident:  # nothing of an earlier server, or of an earlier run, is taken for this pass
            shutil.rmtree(self._files, ignore_errors=True)
            self._files.mkdir(parents=True)
        server = self._pool.server(_NAME)
        assert isinstance(server, SglangServer)
        self._passes += 1
        names = [f"{_REQUEST}{self._passes}-{index}" for index in range(len(texts))]
        try:
            server.request("/generate", "POST", _TIMEOUT_S, {
                "input_ids": texts, "rid": names, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}})
        except EngineFailed:
            server.check()  # why it ended says more
            raise
        of_texts = []
        for name, text in zip(names, texts, strict=True):
            states: list[Tensor] = []
            parts = self._files.glob(f"{name}.*.safetensors")
            for path in sorted(parts, key=lambda path: int(path.name.split(".")[1])):
                with safe_open(path, framework="pt") as handle:
                    states.append(handle.get_tensor("states"))
                path.unlink()
            if (have := sum(map(len, states))) != len(text):
                raise EngineFailed(f"SGLang wrote the states of {have} of the {len(text)} tokens of a text",
                                   f"free memory in {self._files.parent}, or read the log in {self._directory}")
            of_texts.append(torch.cat(states))
        return of_texts


def texts_that_fit(lengths: Sequence[int], token_bytes: int, free_bytes: int) -> int:
    """How many texts, from the first, have states that fit together. Pure.

    lengths      tokens of each text
    token_bytes  of the states of one token
    """
    return sum(size <= free_bytes for size in accumulate(length * token_bytes + _FILE_BYTES for length in lengths))
