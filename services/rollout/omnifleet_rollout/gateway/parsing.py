"""A reply's text -> reasoning, content and tool calls, by vLLM's own parsers, which are named in the settings.

They are pure text code, but importing them imports vLLM and torch (about 540 MB here), so a gateway does it at its start and
only if a parser is named; no engine is started. Text is parsed whole, at the end of a sample: a stream and a whole reply
then say the same, and arguments are the very characters that were sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.config.services import GatewayConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_rollout.gateway.renderer import RendererLoader
from omnifleet_rollout.quiet import quiet_libraries

log = logging.getLogger("omnifleet.gateway")
_TOKENIZER_S = 120.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: as sampled, character by character, where the parser's value stands in the text as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reply's text says."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parser classes of one model; None where the settings name none. request: tools -> what the parsers take for one."""

    tokenizer: Any
    request: Callable[[list[dict[str, Any]] | None], Any]
    tool_class: Any = None
    reasoning_class: Any = None

    @staticmethod
    def load(config: GatewayConfig, tokenizer: Any) -> Parsers | None:
        """The parsers that the settings name, tried once on this tokenizer; None if they name none. Blocks.

        Raises UNSUPPORTED where vLLM is not installed, INVALID_CONFIG for an unknown name or a tokenizer that lacks
        the parser's tokens.
        """
        if not (config.tool_parser or config.reasoning_parser):
            return None
        quiet_libraries()
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"gateway.tool_parser and gateway.reasoning_parser are vLLM's, which is not installed here: {error}",
                knob="pip install omnifleet-rollout[cpu] or [cuda]",
            ) from error
        tool = _class(ToolParserManager.get_tool_parser, ToolParserManager, "tool_parser", config.tool_parser)
        reasoning = _class(
            ReasoningParserManager.get_reasoning_parser,
            ReasoningParserManager,
            "reasoning_parser",
            config.reasoning_parser,
        )
        parsers = Parsers(
            tokenizer,
            lambda tools: ChatCompletionRequest(messages=[], model="", tools=tools),
            tool,
            reasoning,
        )
        try:
            probe = [{"type": "function", "function": {"name": "probe"}}] if tool else []
            parsers._parse("", probe, {"thinking": True, "enable_thinking": True})
        except (RuntimeError, ValueError, LookupError) as error:
            raise invalid(
                f"the model's tokenizer does not suit gateway.tool_parser {config.tool_parser or 'none'} and "
                f"gateway.reasoning_parser {config.reasoning_parser or 'none'}: {error}",
                reason=Reason.INVALID_CONFIG,
            ) from error
        return parsers

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Parsed:
        """Split one reply; one that a parser trips over is all content, so that nothing sampled is lost.

        tools: of the request, in OpenAI's chat form; none: no call is looked for. template_kwargs: some parsers ask them
        whether the model was told to think.
        """
        try:
            return self._parse(text, tools, dict(template_kwargs or {}))
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            log.warning("the parsers trip over a reply of %d characters: %r", len(text), error)
            return Parsed(text)

    def _parse(
        self, text: str, tools: Sequence[Mapping[str, Any]], template_kwargs: dict[str, Any]
    ) -> Parsed:
        request = self.request([dict(tool) for tool in tools] or None)
        reasoning, content = "", text
        if self.reasoning_class is not None:
            parser = self.reasoning_class(self.tokenizer, chat_template_kwargs=template_kwargs)
            found, rest = parser.extract_reasoning(text, request)
            reasoning, content = found or "", rest or ""
        if self.tool_class is None or not tools:
            return Parsed(content, reasoning)
        extracted = self.tool_class(self.tokenizer, request.tools).extract_tool_calls(content, request)
        if not extracted.tools_called:
            return Parsed(content, reasoning)
        arguments = verbatim(content, [call.function.arguments for call in extracted.tool_calls])
        calls = tuple(
            ToolCall(f"call_{uuid.uuid4().hex[:24]}", call.function.name, text)
            for call, text in zip(extracted.tool_calls, arguments, strict=True)
        )
        return Parsed(extracted.content or "", reasoning, calls)


class ParsersLoader:
    """Loads the parsers in a thread, once, as soon as the tokenizer is there; requests wait for them."""

    def __init__(self, config: GatewayConfig, renderer: RendererLoader) -> None:
        self._config, self._renderer = config, renderer
        self._named = bool(config.tool_parser or config.reasoning_parser)
        self._task: asyncio.Task[Parsers | None] | None = None

    def start(self) -> None:
        """Begin to load, if the settings name any."""
        if self._named:
            self._task = asyncio.create_task(self._load())

    async def _load(self) -> Parsers | None:
        renderer = await self._renderer.get(_TOKENIZER_S)
        return await asyncio.to_thread(Parsers.load, self._config, renderer.tokenizer)

    @property
    def settled(self) -> bool:
        """True once there is nothing more to wait for."""
        return self._task is None or self._task.done()

    async def get(self) -> Parsers | None:
        """The parsers; None if the settings name none. Raises what `Parsers.load` raises, UNAVAILABLE if it is late."""
        if self._task is None:
            return None
        if self._task.done():
            return self._task.result()
        try:
            return await asyncio.wait_for(asyncio.shield(self._task), self._config.request_timeout_s)
        except TimeoutError:
            raise OmnifleetError(
                Reason.UNAVAILABLE, "the parsers are still loading", retryable=True
            ) from None


def verbatim(text: str, arguments: Sequence[str]) -> list[str]:
    """Each call's arguments as they stand in `text`, in order; the parser's own form where they do not stand there.

    Parsers load the JSON and write it again, which changes spaces and key order, and so the tokens of a next turn.
    """
    decoder, position, found = json.JSONDecoder(), 0, []
    for parsed in arguments:
        start, end = _find(decoder, text, _value(parsed), position)
        found.append(text[start:end] if end else parsed)
        position = end or position
    return found


def _find(decoder: json.JSONDecoder, text: str, value: Any, position: int) -> tuple[int, int]:
    """Where an object equal to `value` stands in text[position:]; (0, 0) if nowhere."""
    start = text.find("{", position)
    while start >= 0 and isinstance(value, dict):
        try:
            candidate, end = decoder.raw_decode(text, start)
        except ValueError:
            candidate = None
        if candidate == value:
            return start, end
        start = text.find("{", start + 1)
    return 0, 0


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _class(get: Any, registry: Any, setting: str, name: str) -> Any:
    if not name:
        return None
    try:
        return get(name)
    except KeyError as error:
        known = ", ".join(registry.list_registered())
        raise invalid(
            f"gateway.{setting} {name!r} is not one of vLLM's: {known}",
            knob=f"gateway.{setting}",
            reason=Reason.INVALID_CONFIG,
        ) from error
