"""Conversion of examples to tokens: conversations, prompts with completions, and plain texts.

A token counts in the loss if any of its characters belongs to an answer. The characters of an
answer are the characters that the chat template marks with `{% generation %}`. If the template has
no such marks, they are the characters that the assistant's message adds to the rendered
conversation that precedes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dray import spec
from ray_workers.datasets.core.errors import broken, listed, printable, reading, shortened
from ray_workers.datasets.formats.examples import Encoded

ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
FORMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
"""The fields by which each form of an example is recognised (`data.examples`)."""
SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""The role for each value of `from` in ShareGPT's form."""
ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n"
)
"""The prompt of Stanford Alpaca, for tokenizers without a chat template."""

SIDES = ("chosen", "rejected")
"""The answers of a preference pair, in order."""
OPENAI = ("preferred_output", "non_preferred_output")
"""The names of `SIDES` in OpenAI's format."""

Message = dict[str, Any]
Span = tuple[int, int]


class ExampleEncoder:
    """Encodes the examples of one data set, which all have the same form."""

    def __init__(self, tokenizer: Any, options: spec.Sft, form: str | None = None) -> None:
        """tokenizer: a fast tokenizer of transformers. form: key in `FORMS`; None to recognise it
        by the fields of the examples."""
        self._tokenizer = tokenizer
        self._all = options.loss == "all"
        self._given = form
        self.form = form
        """Key in `FORMS` of the examples so far."""

    def encode(self, location: str, record: Mapping[str, Any]) -> Encoded:
        """Return the tokens of an example. Raises DataError."""
        record = {key: value for key, value in record.items() if value is not None}
        if record.keys() & {*SIDES, *OPENAI}:
            raise broken(
                location,
                "is a preference pair, but the method sft learns from single answers: set "
                "method.name to dpo or reward, or give examples of another form",
            )
        form = self._given or _recognised(location, record)
        if self.form not in (None, form):
            raise broken(
                location,
                f"has the form {form}, but the lines before it have the form {self.form}: all "
                "examples of a source must have the same form. Put them into two files, and list "
                "both in data.sources",
            )
        self.form = form
        with reading(location, "can't be converted to tokens"):
            return self._encode(location, record, form)

    def _encode(self, location: str, record: Mapping[str, Any], form: str) -> Encoded:
        missing = [key for key in FORMS[form] if key not in record]
        if missing and form not in ("completion", "text"):
            raise broken(location, f"has no `{missing[0]}`, which an example of {form} needs")
        match form:
            case "text":
                return self._text(location, record.get("text"))
            case "completion":
                return self._prompt(location, record)
            case "alpaca":
                return self._alpaca(location, record)
            case "sharegpt":
                given = _objects(location, "conversations", record["conversations"])
                messages = [_from_sharegpt(location, n, one) for n, one in enumerate(given, 1)]
            case _:
                messages = _objects(location, "messages", record["messages"])
        if isinstance(system := record.get("system"), str) and system:
            messages = [{"role": "system", "content": system}, *messages]
        return self._messages(location, messages, _tools(location, record))

    def _prompt(self, location: str, record: Mapping[str, Any]) -> Encoded:
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, list) or not isinstance(completion, list):
            return self._completion(location, prompt, completion)
        known = [{**one, "weight": 0} if isinstance(one, dict) else one for one in prompt]
        return self._messages(location, [*known, *completion], _tools(location, record))

    def _alpaca(self, location: str, record: Mapping[str, Any]) -> Encoded:
        instruction, output = record["instruction"], record["output"]
        more = record.get("input", "")
        if not all(isinstance(one, str) for one in (instruction, output, more)):
            raise broken(location, "has an `instruction`, `input` or `output` that is not a string")
        if record.get("history"):
            raise broken(location, "has a `history`: write it as `messages`, with all its turns")
        if self._tokenizer.chat_template:
            question = f"{instruction}\n\n{more}" if more else instruction
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": output},
            ]
            if record.get("system"):
                messages = [{"role": "system", "content": record["system"]}, *messages]
            return self._messages(location, messages, None)
        prompt = ALPACA.format(
            more=", paired with an input that provides further context" if more else "",
            instruction=instruction,
            input=f"\n\n### Input:\n{more}" if more else "",
        )
        return self._completion(location, prompt, output)

    def _text(self, location: str, text: Any) -> Encoded:
        if not isinstance(text, str) or not text:
            raise broken(location, "has a `text` that is empty or not a string")
        return self._ended(text, [(0, len(text))])

    def _completion(self, location: str, prompt: Any, completion: Any) -> Encoded:
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise broken(
                    location,
                    f"has a `{name}` that is missing or not a string: give two strings, or two "
                    "lists of messages",
                )
        if not completion:
            raise broken(location, "has no answer: its `completion` is empty")
        text = prompt + completion
        return self._ended(text, [(0 if self._all else len(prompt), len(text))])

    def _ended(self, text: str, answers: Sequence[Span]) -> Encoded:
        """Encode a text with the tokens that the tokenizer adds, and with an end token, which
        counts in the loss."""
        ids, counts = self._encoded(text, answers, special=True)
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1] != end:
            return Encoded([*ids, end], [*counts, True])
        return Encoded(ids, [*counts[:-1], end is not None or counts[-1]])

    def _messages(self, location: str, given: Sequence[Any], tools: Any) -> Encoded:
        messages = _checked(location, given)
        if not self._tokenizer.chat_template:
            raise broken(
                location, "has messages, but the tokenizer of model.base has no chat template"
            )
        template = self._tokenizer.get_chat_template(tools=tools)
        is_marked = MARK.search(template) is not None
        text, marks = self._rendered(location, messages, tools, template, is_marked=is_marked)
        if self._all:
            return self._encoded(text, [(0, len(text))], special=False)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        counted = [n for n in answers if messages[n].get("weight") != 0]
        if is_marked:
            if len(marks) != len(answers):
                raise broken(
                    location,
                    f"has {len(answers)} assistant messages, but the chat template marks "
                    f"{len(marks)} parts with {{% generation %}}",
                )
            spans = [span for n, span in zip(answers, marks, strict=True) if n in counted]
        else:
            spans = [self._added(location, messages, n, tools, template, text) for n in counted]
        return self._encoded(text, spans, special=False)

    def _added(
        self,
        location: str,
        messages: Sequence[Message],
        number: int,
        tools: Any,
        template: str,
        text: str,
    ) -> Span:
        """Return the characters that a message adds to the rendered conversation that precedes
        it."""
        if number == 0:
            raise broken(
                location,
                "begins with an answer. Without {% generation %} in the chat template, dray does "
                "not know where the answer's header ends: put a message before the answer, or set "
                "its weight to 0",
            )
        before, _ = self._rendered(location, messages[:number], tools, template, is_prompt=True)
        until, _ = self._rendered(location, messages[: number + 1], tools, template)
        if not until.startswith(before) or not text.startswith(until):
            raise broken(
                location,
                "can't be divided into prompts and answers: the chat template renders the first "
                f"{number + 1} messages differently if other messages follow. Mark the answers in "
                "the template with {% generation %} and {% endgeneration %}, set the weight of all "
                "answers except the last to 0, or set method.loss to all",
            )
        return len(before), len(until)

    def _rendered(
        self,
        location: str,
        messages: Sequence[Message],
        tools: Any,
        template: str,
        *,
        is_prompt: bool = False,
        is_marked: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of the messages, and the parts of the text that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
        try:
            render: Any = render_jinja_template  # its annotation is wrong
            (text,), marks = render(
                conversations=[plain],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=is_marked,
                add_generation_prompt=is_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError) as error:
            words = printable(str(error))
            raise broken(location, f"is refused by the chat template: {words}") from error
        return text, [(start, end) for start, end in marks[0]] if is_marked else []

    def _encoded(self, text: str, answers: Sequence[Span], *, special: bool) -> Encoded:
        text.encode()  # names half of a surrogate pair; the tokenizer's error would not
        encoded = self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
        )
        counts = [
            any(start < stop and end > first for first, stop in answers)
            for start, end in encoded["offset_mapping"]
        ]
        return Encoded(list(encoded["input_ids"]), counts)


def _recognised(location: str, record: Mapping[str, Any]) -> str:
    """Return the form of an example. Raises DataError unless there is exactly one."""
    found = [form for form, keys in FORMS.items() if all(key in record for key in keys)]
    if not found:  # an error will state what is missing
        found = [form for form, keys in FORMS.items() if any(key in record for key in keys)]
    if not found:
        forms = "; ".join(f"{form}: {', '.join(keys)}" for form, keys in FORMS.items())
        given = f"the fields {listed(record)}" if record else "no fields"
        raise broken(
            location,
            f"has {given}, but it needs the fields of one form of examples: {forms}",
        )
    if len(found) > 1:
        raise broken(
            location,
            f"could have the form {' or '.join(found)}, because it has the fields "
            f"{listed(record)}: set data.examples to one of these forms",
        )
    return found[0]


def _objects(location: str, name: str, given: Any) -> list[Any]:
    """Return a list that can also be given as JSON in a string."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise broken(location, f"has `{name}` as a string that is not JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise broken(location, f"has `{name}` that are empty or not a list")
    return given


def _tools(location: str, record: Mapping[str, Any]) -> Any:
    tools = record.get("tools")
    return _objects(location, "tools", tools) if tools else None


def _from_sharegpt(location: str, number: int, given: Any) -> Message:
    location = f"{location}, message {number}"
    if not isinstance(given, dict) or "value" not in given:
        raise broken(location, "is not an object with `from` and `value`")
    sender = given.get("from")
    if sender not in SENDERS:
        raise broken(location, f"is from {shortened(sender)}; senders are {listed(SENDERS)}")
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    return {**rest, "role": SENDERS[sender], "content": given["value"]}


def _checked(location: str, given: Sequence[Any]) -> list[Message]:
    """Return the messages in the form that chat templates expect. Raises DataError unless the
    messages are a conversation that ends with an answer."""
    messages = [_message(f"{location}, message {n}", one) for n, one in enumerate(given, start=1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise broken(location, "has no answer: no message has the role assistant")
    if roles[-1] != "assistant":
        raise broken(
            location,
            f"ends with a message of the role {roles[-1]}: the last message must be an answer",
        )
    for number, (before, role) in enumerate(zip([None, *roles], roles, strict=False), start=1):
        if role in ("system", "developer") and number > 1:
            raise broken(
                location,
                f"has a {role} message as message number {number}: a {role} message must be the "
                "first message",
            )
        if role == "tool" and before not in ("assistant", "tool"):
            raise broken(
                location,
                f"has a tool message as message number {number}: a tool message must follow a call "
                "by the assistant",
            )
    if all(m.get("weight") == 0 for m in messages if m["role"] == "assistant"):
        raise broken(location, "has no answer that counts: all have the weight 0")
    return messages


def _message(location: str, given: Any) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        role = given.get("role") if isinstance(given, dict) else given
        raise broken(
            location, f"has the role {shortened(role)}; the supported roles are {listed(ROLES)}"
        )
    given = {key: value for key, value in given.items() if value is not None}
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
            raise broken(location, "has content other than text")
        content = "".join(one["text"] for one in content)
    if content is not None and not isinstance(content, str):
        raise broken(location, "has a `content` that is not a string")
    if given.get("weight") not in (None, 0, 1):
        raise broken(location, f"has the weight {shortened(given['weight'])}: it must be 0 or 1")
    calls = given.get("tool_calls")
    if given["role"] == "assistant" and not content and not calls:
        raise broken(location, "is an empty answer: it has neither content nor tool_calls")
    if content is None and given["role"] != "assistant":
        raise broken(location, "has no `content`")
    return {
        **given,
        "content": content or "",
        **({"tool_calls": [_call(location, one) for one in calls]} if calls else {}),
    }


def _call(location: str, call: Any) -> Any:
    """Return a call whose arguments are an object, as chat templates expect; in OpenAI's format,
    the arguments are JSON in a string."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise broken(location, "has a call in `tool_calls` without a `function`")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise broken(location, "has a call whose `arguments` are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
