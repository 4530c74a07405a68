"""A target's chat template: read from its files, rendered, and probed for what it does with a conversation.

A template is a Jinja program shipped with the tokenizer. It runs as in transformers (sandboxed, trimmed blocks, the
same globals and `tojson`), without importing transformers, which costs seconds at every start of a process.

Templates expect one conversation in different forms, and a form that a template does not expect loses text without an
error. `probe` renders short conversations of marker words, one per role, and looks for the words in the result:

    content     as text or as a list of parts: the first form that shows the words of system, user and assistant
    arguments   of a tool call, as an object or as JSON text
    reasoning   the name under which an assistant's reasoning is printed, and whether it is in earlier turns
    developer   whether the template has this role; if not, its text is rendered as that of `system`
    lost        roles whose text does not reach the prompt in any form: conversations that have them are refused

A role that the template refuses with an error is no loss: it then refuses the conversation, and says why.

The control plane probes a submitted target in a process of its own with limits (`probe_apart`), because a template is a
program of a stranger; stages and engines probe it when they read the tokenizer. Both use this module.
"""

import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from eyrie_api import client_left
from eyrie_api.chat_messages import Message
from eyrie_api.contract.model import Frozen
from eyrie_api.data_files import open_regular
from eyrie_api.errors import InvalidInput, NoChatTemplate

MAX_TEMPLATE_CHARACTERS = 1 << 20
"""The longest published templates have 30 kB."""

_PROBE_SECONDS, _PROBE_BYTES = 4, 2 << 30
"""Of processor time and memory. Rendering takes milliseconds, but a busy machine starts a process slowly: six times as
long may go by."""

_LISTEN_S = 0.2
"""Between two looks at whether the client that waits for a template's process has left."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ERRORS = (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError, ArithmeticError, LookupError,
           RecursionError)
"""What a template raises: its own refusals, and faults of its program on values that it does not expect."""

_SYSTEM, _USER, _ANSWER, _LAST, _RESULT, _ARGUMENT, _THOUGHT, _DEVELOPER = (
    f"Word{number}x" for number in range(8))
_CALL: Message = {"id": "call00000", "type": "function",
                  "function": {"name": "lookup", "arguments": json.dumps({"place": _ARGUMENT})}}
_TOOL_TURN: Message = {"role": "tool", "content": _RESULT, "name": "lookup", "tool_call_id": _CALL["id"]}
_TOOLS: list[Message] = [{"type": "function", "function": {
    "name": "lookup", "description": "Look a place up.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Its name."}},
                   "required": ["place"]}}}]


class Form(Frozen):
    """The form of a conversation that a template expects, and what the template does with it."""

    content: Literal["text", "parts"] = "text"
    arguments: Literal["object", "text"] = "object"
    reasoning: str = "reasoning_content"
    """The name of the field with an assistant's reasoning."""

    prints_reasoning: bool = False
    keeps_reasoning: bool = False
    """Whether the reasoning of turns before the last question is printed."""

    developer: bool = False
    lost: tuple[str, ...] = ()
    """Of `system`, `user`, `assistant`, `tool calls` and `tool`."""

    refused: tuple[str, ...] = ()
    """Of `system` and `tool`: roles that the template answers with an error."""

    turn_end: str = ""
    """What the template prints after an answer."""


class ChatTemplate:
    """The templates of one tokenizer: `default`, and where it has one `tool_use`."""

    def __init__(self, sources: Mapping[str, tuple[str, str]], special: Mapping[str, str]) -> None:
        """
        sources   by name, the file of the template and its text
        special   special tokens by kind (`bos_token`), variables of the template

        Raises NoChatTemplate, naming the file, for a template that is empty, too long or no Jinja.
        """
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._special = dict(special)
        self.has_developer = any("developer" in text for _, text in sources.values())
        for name, (where, text) in sources.items():
            if not text.strip():
                raise NoChatTemplate(f"the chat template in {where} is empty", "restore the model's own template")
            if len(text) > MAX_TEMPLATE_CHARACTERS:
                raise NoChatTemplate(f"the chat template in {where} has more than {MAX_TEMPLATE_CHARACTERS} characters",
                                     "restore the model's own template")
            try:
                self._templates[name] = environment.from_string(text)
            except (jinja2.TemplateSyntaxError, RecursionError) as error:
                line = getattr(error, "lineno", None)
                raise NoChatTemplate(f"the chat template in {where} is not valid Jinja"
                                     f"{'' if line is None else f' (line {line})'}: {error}",
                                     "correct the template") from None

    @cached_property
    def form(self) -> Form:
        """What `probe` finds. Raises InvalidInput when the template refuses a question with an answer."""
        return probe(self)

    def values(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
               form: Form) -> dict[str, Any]:
        """The conversation as the template's variables.

        messages   in the normal form of `eyrie_api.chat_messages`
        """
        return {"tools": list(tools) if tools else None, "messages": [_in_form(message, form) for message in messages]}

    def render(self, values: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises InvalidInput when the template refuses it."""
        name = "tool_use" if values["tools"] and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(**{**values, "documents": None, "add_generation_prompt": add_generation_prompt,
                                      **self._special})
        except _ERRORS as error:
            raise InvalidInput(f"the target's chat template refuses this conversation: {error}",
                               "check roles, their order and the content of each message") from error


def probe(template: ChatTemplate) -> Form:
    """The form that a template expects. Raises InvalidInput when it refuses a question with an answer."""
    def rendered(form: Form, *messages: Message, generate: bool = False, tools: bool = False) -> str | None:
        try:
            return template.render(template.values(messages, _TOOLS if tools else None, form), generate)
        except InvalidInput:
            return None

    system, user = {"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}
    answer, last = {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _LAST}
    words = {"system": _SYSTEM, "user": _USER, "assistant": _ANSWER}

    # 1. Content: the form that loses the fewest roles; text where both lose as many.
    attempts: list[tuple[int, Form]] = []
    for form in (Form(), Form(content="parts")):
        refused: tuple[str, ...] = ()
        text = rendered(form, system, user, answer, last, generate=True)
        if text is None:
            refused, text = ("system",), rendered(form, user, answer, last, generate=True)
        if text is not None:
            lost = tuple(role for role, word in words.items() if word not in text and role not in refused)
            attempts.append((len(lost), Form(content=form.content, lost=lost, refused=refused)))
    if not attempts:  # again, for the error
        template.render(template.values((user, answer, last), None, Form()), True)
    form = min(attempts, key=lambda attempt: attempt[0])[1]

    # 2. What ends an answer.
    text = rendered(form, user, answer) or ""
    changes: dict[str, Any] = {"turn_end": text.rpartition(_ANSWER)[2] if _ANSWER in text else ""}

    # 3. Reasoning: of the last turn, and of one before another question.
    for name in ("reasoning_content", "reasoning", "thinking"):
        named = form.model_copy(update={"reasoning": name})
        thought = answer | {"reasoning_content": _THOUGHT}
        if _THOUGHT in (rendered(named, user, thought) or ""):
            changes |= {"reasoning": name, "prints_reasoning": True,
                        "keeps_reasoning": _THOUGHT in (rendered(named, user, thought, last, generate=True) or "")}
            break

    # 4. Calls and results of tools. An object printed in Python's syntax is not what a model was trained on.
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    in_python = repr({"place": _ARGUMENT})
    texts = {kind: rendered(form.model_copy(update={"arguments": kind}), user, called, _TOOL_TURN, generate=True,
                            tools=True) for kind in ("object", "text")}
    whole = [kind for kind, text in texts.items() if text is not None and _ARGUMENT in text and in_python not in text]
    kind = whole[0] if whole else "object" if texts["object"] is not None else "text"
    text = texts[kind]
    if text is None:
        changes["refused"] = (*form.refused, "tool")
    else:
        changes["lost"] = (*form.lost, *(role for role, word in (("tool calls", _ARGUMENT), ("tool", _RESULT))
                                         if word not in text))
    # 5. The developer's role, where the template's text has its name.
    developer = {"role": "developer", "content": _DEVELOPER}
    shown = template.has_developer and _DEVELOPER in (
        rendered(form.model_copy(update={"developer": True}), developer, user, generate=True) or "")
    return form.model_copy(update=changes | {"arguments": kind, "developer": shown})


def probes(form: Form) -> list[tuple[list[Message], list[Message]]]:
    """Conversations and their tools, in normal form, that another renderer of the template can be compared on: of the
    roles that the template neither refuses nor loses."""
    unusable = {*form.lost, *form.refused}
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    pairs: list[tuple[list[Message], list[Message]]] = [([user, answer, {"role": "user", "content": _LAST}], [])]
    if "system" not in unusable:
        pairs.append(([{"role": "system", "content": _SYSTEM}, user], []))
    if form.prints_reasoning:
        pairs.append(([user, answer | {"reasoning_content": _THOUGHT}, {"role": "user", "content": _LAST}], []))
    if not unusable & {"tool", "tool calls"}:
        pairs.append(([user, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _TOOL_TURN], _TOOLS))
    return pairs


def require_text(form: Form, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidInput for a conversation with a role whose text the template loses."""
    for message in messages:
        role = "tool calls" if message.get("tool_calls") and "tool calls" in form.lost else message["role"]
        if role in form.lost or (role == "developer" and not form.developer and "system" in form.lost):
            raise InvalidInput(f"the target's chat template loses the text of {role!r}: it would not reach the prompt",
                               "leave such turns out, or correct the template")


def _in_form(message: Mapping[str, Any], form: Form) -> Message:
    values = dict(message)
    if values["role"] == "developer" and not form.developer:
        values["role"] = "system"
    if form.content == "parts":
        values["content"] = [{"type": "text", "text": values["content"]}]
    if "reasoning_content" in values:
        values[form.reasoning] = values.pop("reasoning_content")
    if values.get("tool_calls") and form.arguments == "object":
        values["tool_calls"] = [call | {"function": call["function"] | {
            "arguments": _parsed(call["function"]["arguments"])}} for call in values["tool_calls"]]
    return values


def _parsed(arguments: str) -> Any:
    """Arguments as an object: templates print them with `tojson`, which would quote a text once more."""
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # as templates print it: text that can be encoded
    except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, deep nesting, surrogates
        return arguments  # a malformed call of the model is kept as text
    return parsed


# Files.


def read_sources(directory: Path, settings: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """File and text of each template by its name; a later place replaces an earlier one of the same name.

    settings   of tokenizer_config.json
    legacy     of chat_template.json, if there is one

    Raises NoChatTemplate for a file that cannot be read.
    """
    sources: dict[str, tuple[str, str]] = {}
    for file, declared in (("tokenizer_config.json", settings.get("chat_template")),
                           ("chat_template.json", legacy.get("chat_template"))):
        where = str(directory / file)
        entries = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                sources[str(entry.get("name", "default"))] = (where, entry["template"])
    files = {"default": directory / "chat_template.jinja"} | {
        file.stem: file for file in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                with io.TextIOWrapper(open_regular(path), encoding="utf-8") as opened:
                    sources[name] = (str(path), opened.read(MAX_TEMPLATE_CHARACTERS + 1))
            except (OSError, ValueError) as error:
                raise NoChatTemplate(f"{path} cannot be read: {error}", "correct the template") from None
    return sources


def special_tokens(*settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by their kind; those of later settings replace those of earlier ones."""
    tokens: dict[str, str] = {}
    for source in settings:
        for kind in _SPECIAL_NAMES:
            value = source.get(kind)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[kind] = value
    return tokens


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for loss masks; for rendering it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


# The probe as a program: sources, special tokens and prompts in; the form and refusals, or an error, out.


Prompt = tuple[Sequence[Message], Sequence[Message], Mapping[str, Any]]
"""Messages and tools in normal form, and variables for the template."""


def probe_apart(sources: Mapping[str, tuple[str, str]], special: Mapping[str, str],
                prompts: Sequence[Prompt] = ()) -> tuple[Form, list[str]]:
    """`probe` in a process with limits of time and memory, and for each of some prompts why the template refuses it;
    empty where it does not.

    Raises NoChatTemplate for a template that is no Jinja, refuses any conversation, or exceeds a limit.
    """
    with tempfile.TemporaryFile("w+") as given:  # a pipe takes all of it only from a process that reads
        given.write(json.dumps([sources, special, prompts]))
        given.seek(0)
        with subprocess.Popen([sys.executable, "-m", __name__, str(_PROBE_SECONDS)], text=True, stdin=given,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = _outputs(process)
            finally:
                process.kill()  # where the client has left, or the time is over; without effect on one that has ended
    if process.returncode != 0 or not output:
        failure = errors.strip().rpartition("\n")[2]  # empty where a limit of the kernel ended it
        what = f"{len(prompts)} conversations of the data" if prompts else "a conversation of four short turns"
        raise NoChatTemplate(f"the target's chat template does not render {what} within {_PROBE_SECONDS} seconds and "
                             f"{_PROBE_BYTES >> 30} GiB{failure and f' ({failure})'}",
                             "restore the model's own template")
    answer = json.loads(output)
    if "error" in answer:
        raise NoChatTemplate(answer["error"], answer["hint"])
    return Form.model_validate(answer["form"]), answer["refusals"]


def _outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process prints and reports; empty where it does not end in time."""
    until_s = time.monotonic() + 6 * _PROBE_SECONDS
    while time.monotonic() < until_s:
        client_left.check()
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_LISTEN_S)
    return "", ""


def _refusal(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message],
             variables: Mapping[str, Any]) -> str:
    try:
        require_text(template.form, messages)
        template.render({**variables, **template.values(messages, tools, template.form)}, add_generation_prompt=True)
    except InvalidInput as error:
        return error.message
    return ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_PROBE_BYTES, _PROBE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
    sources, special, prompts = json.load(sys.stdin)
    try:
        template = ChatTemplate(sources, special)
        answer = {"form": template.form.model_dump(), "refusals": [_refusal(template, *prompt) for prompt in prompts]}
    except (InvalidInput, NoChatTemplate) as error:
        answer = {"error": error.message, "hint": error.hint}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
