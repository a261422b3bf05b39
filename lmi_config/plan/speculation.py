# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: vLLM's configuration, and the reasons why a draft cannot be used."""

import dataclasses
from typing import Any

from lmi_config.facts.draft import Draft
from lmi_config.facts.draft import asked as draft_as_asked
from lmi_config.facts.draft import faults as draft_faults
from lmi_config.facts.layers import KvLayers
from lmi_config.facts.model import ModelError, ModelFacts
from lmi_config.options.declared import SPECULATIVE_TOKENS, Settings


def draft_id(settings: Settings) -> str | None:
    """The named draft: a folder, an S3 prefix, a hub id, or None."""
    config = settings.speculative_config or {}
    model = settings.speculative_draft_model or config.get("model")
    return model if isinstance(model, str) and model else None


def config(settings: Settings, draft: Draft | None) -> dict[str, Any] | None:
    """Return vLLM's speculative_config, from the operator's, or only from the draft, or None."""
    found = dict(settings.speculative_config or {})
    if model := draft_id(settings):
        found["model"] = model
    if settings.num_speculative_tokens is not None:
        found["num_speculative_tokens"] = settings.num_speculative_tokens
    if draft:
        if draft.method:
            found.setdefault("method", draft.method)
        found.setdefault("num_speculative_tokens", draft.tokens or SPECULATIVE_TOKENS)
        if draft.parallel:
            found.setdefault("parallel_drafting", True)
    return found or None


def kept(draft: Draft) -> KvLayers:
    """Return a draft's layers, by the state that vLLM keeps for them. EAGLE drafts run with vLLM's
    own classes, whatever the names of their architectures.
    """
    found = draft.facts.kept
    own = draft.method in ("eagle", "eagle3") and draft.architecture
    return dataclasses.replace(found, foreign="") if own else found


def faults(settings: Settings, model: ModelFacts, draft: Draft | None) -> list[str]:
    """Return why the draft cannot be used as requested, a sentence for each reason."""
    asked = settings.speculative_config or {}
    name = "OPTION_SPECULATIVE_DRAFT_MODEL"
    found = []
    for option, key, value in (
        (name, "model", settings.speculative_draft_model),
        (
            "OPTION_NUM_SPECULATIVE_TOKENS",
            "num_speculative_tokens",
            settings.num_speculative_tokens,
        ),
    ):
        if value is not None and asked.get(key, value) != value:
            found.append(f"{option} and the {key} in OPTION_SPECULATIVE_CONFIG differ; keep one")
    tokens = settings.num_speculative_tokens
    if tokens is None:
        tokens = asked.get("num_speculative_tokens")
    if tokens is not None and draft is None and not asked:
        found.append(f"OPTION_NUM_SPECULATIVE_TOKENS={tokens}: there is no draft; set {name}")
    if tokens is not None and not isinstance(tokens, int):
        found.append(f"num_speculative_tokens={tokens!r}: should be a whole number, like 3")
        tokens = None
    method = asked.get("method")
    draft = draft and draft_as_asked(draft, method)
    checked = method in (None, draft and draft.method)
    if draft and checked and not asked.get("use_heterogeneous_vocab"):
        wanted = tokens if tokens is not None else draft.tokens or SPECULATIVE_TOKENS
        try:
            reasons = draft_faults(draft, model, wanted)
        except ModelError as error:
            reasons = [str(error)]
        found += [f"{draft_id(settings)}: {reason}" for reason in reasons]
    return found
