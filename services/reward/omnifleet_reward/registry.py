"""name@version -> scorer. `module:function` is found only in modules that the configuration names."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from omnifleet.config.base import config_error
from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_reward.combine import Reward, Term
from omnifleet_reward.scorer import NoParams, Scorer, Verdict
from omnifleet_reward.scorers import BUILT_IN

_KNOB = "reward_service.modules"


class Registry:
    """Built-in scorers and those of `modules`, imported at once. Raises INVALID_CONFIG for a broken module."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = {name: _imported(name) for name in modules}
        self._versions: dict[str, list[Scorer]] = {}
        for scorer in BUILT_IN:
            self._versions.setdefault(scorer.name, []).append(scorer)

    def known(self) -> list[Scorer]:
        """Every scorer that can be named, built-in first; plain functions of modules included."""
        scorers = [scorer for versions in self._versions.values() for scorer in versions]
        for name, module in self._modules.items():
            public = [key for key in vars(module) if not key.startswith("_")]
            scorers += [found for key in public if (found := _scorer_in(module, name, key)) is not None]
        return scorers

    def find(self, name: str, version: str = "") -> Scorer:
        """The scorer, its newest version by default. Raises NOT_FOUND; INVALID_REQUEST for a module not allowed."""
        versions = self._custom(name) if ":" in name else self._versions.get(name, [])
        if not versions:
            known = ", ".join(sorted(self._versions))
            raise invalid(
                f"scorer {name!r} is unknown; known: {known}, or module:function", reason=Reason.NOT_FOUND
            )
        if not version:
            return versions[-1]
        for scorer in versions:
            if scorer.version == version:
                return scorer
        has = ", ".join(scorer.version for scorer in versions)
        raise invalid(f"scorer {name!r} has no version {version!r}; it has: {has}", reason=Reason.NOT_FOUND)

    def reward(self, scorers: Sequence[ScorerConfig]) -> Reward:
        """Check names and parameters, normalise weights to sum 1. Raises INVALID_REQUEST or NOT_FOUND."""
        if not scorers:
            raise invalid("a reward needs at least one scorer", knob="reward")
        total = sum(config.weight for config in scorers)
        terms = tuple(self._term(config, config.weight / total) for config in scorers)
        labels = [term.scorer.label for term in terms]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise invalid(f"scorers named more than once: {', '.join(twice)}", knob="reward")
        return Reward(terms)

    def _term(self, config: ScorerConfig, weight: float) -> Term:
        scorer = self.find(config.name, config.version)
        try:
            params = scorer.params.model_validate(config.params)
        except ValidationError as error:
            told = config_error(error, scorer.params, f"params of scorer {scorer.label}")
            raise invalid(told.message, knob="reward.params") from None
        return Term(scorer, params, weight)

    def _custom(self, name: str) -> list[Scorer]:
        module_name, _, key = name.partition(":")
        module = self._modules.get(module_name)
        if module is None:
            allowed = ", ".join(self._modules) or "none"
            raise invalid(
                f"scorer {name!r}: module {module_name!r} is not allowed; allowed: {allowed}", knob=_KNOB
            )
        scorer = None if key.startswith("_") else _scorer_in(module, module_name, key)
        if scorer is None:
            raise invalid(
                f"scorer {name!r}: {module_name} has no public scorer function {key!r} (coroutines are none: "
                "let a Scorer with `ask`, or the scorer `remote`, wait for other services)",
                reason=Reason.NOT_FOUND,
            )
        return [scorer]


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise OmnifleetError(
            Reason.INVALID_CONFIG, f"scorer module {name!r}: {type(error).__name__}: {error}", knob=_KNOB
        ) from error


def _scorer_in(module: ModuleType, module_name: str, key: str) -> Scorer | None:
    """`module:key` as a scorer: a Scorer, or a function of the module's own (reply) -> Verdict, number or bool."""
    found = vars(module).get(key)
    name = f"{module_name}:{key}"
    if isinstance(found, Scorer):
        return replace(found, name=name)
    if not inspect.isfunction(found) or found.__module__ != module.__name__:
        return None
    if inspect.iscoroutinefunction(found):  # it would hold a scorer process while it waits
        return None
    doc = (inspect.getdoc(found) or "").partition("\n")[0]
    return Scorer(name, _source_version(module), doc, _plain(found))


def _plain(function: Callable[..., Any]) -> Callable[..., Verdict]:
    def judge(reply: Any, params: NoParams) -> Verdict:
        result = function(reply)
        if isinstance(result, bool):
            return Verdict(float(result), result)
        return result if isinstance(result, Verdict) else Verdict(result)

    return judge


def _source_version(module: ModuleType) -> str:
    """A function has no version of its own: its module's source is it."""
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    return f"src-{hashlib.sha256(source).hexdigest()[:12]}"
