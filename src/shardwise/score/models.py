"""The model of a published run: a config made of the catalogue and of the row's columns."""

from __future__ import annotations

import json
from functools import lru_cache

from shardwise.model.hf import from_config, load_model, to_config
from shardwise.model.read import MAX_LAYERS, ModelError
from shardwise.model.spec import Model
from shardwise.score.facts import ModelRule, model_rules
from shardwise.score.skip import SkipError
from shardwise.score.table import Published


def model_of(row: Published) -> Model:
    """The model that a row trains. Raises SkipError."""
    rule = next((rule for rule in model_rules() if rule.match.search(row.model)), None)
    if rule is None:
        raise SkipError("model", f"{row.model or 'nameless'}: not known, and its dimensions do not say its family")
    return _model(row.model, json.dumps(_config(row, rule), sort_keys=True))


def _config(row: Published, rule: ModelRule) -> dict[str, object]:
    config: dict[str, object] = {**(to_config(load_model(rule.like)) if rule.like else {}), **rule.config}
    for column, key in rule.columns.items():
        if (value := getattr(row, column)) is not None:
            config[key] = value
    if rule.repeat:
        if row.layers is None or row.layers > MAX_LAYERS:
            raise SkipError("model", f"{row.model}: found {row.layers} layers, wanted 1 to {MAX_LAYERS:,}")
        config[rule.repeat] = str(config[rule.repeat]) * row.layers
    return config


@lru_cache(maxsize=1024)
def _model(name: str, config: str) -> Model:
    try:
        return from_config(json.loads(config), name, name)
    except ModelError as error:
        more = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
        raise SkipError("model", f"{name}: {error.faults[0]}{more}") from None
