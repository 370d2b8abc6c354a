"""The front door: chat and tokens in, placement, retries by continuation, events out. Knows workers by their wire only.

Renders text with the checkpoint's tokenizer; imports no model code, no torch, no engine. One exception, by setting: the
parsers of tool calls and reasoning are vLLM's text code (`parsing`).
"""
