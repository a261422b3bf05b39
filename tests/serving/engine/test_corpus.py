# SPDX-License-Identifier: Apache-2.0
"""vLLM's own parser accepts every configuration of the corpus that a plan accepts."""

from lmi_config.plan.vllm import arguments
from serving.engine.vllm import parse
from tests.lmi_config.corpus import corpus, planned


def test_vllm_accepts_the_arguments_of_every_accepted_plan(tmp_path):
    found = {}
    for number, (line, verdict) in enumerate(corpus()):
        if verdict.startswith("runs"):
            store = tmp_path / str(number)
            store.mkdir()
            options = {**planned(line, 8, store).options}
            options.pop("chat_template", None)  # a file that is not here
            found[tuple(arguments(options))] = line
    refused = []
    for given, line in found.items():
        try:
            parse([*given])
        except (ValueError, TypeError, KeyError) as error:
            refused.append((line, str(error)))
    assert not refused
    assert len(found) > 100
