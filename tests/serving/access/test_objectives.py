# SPDX-License-Identifier: Apache-2.0
"""The priority of requests, by the objectives that they name."""

import pytest

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access.caller import ANYBODY, Caller
from serving.access.objectives import Objectives, parsed
from serving.protocol import OBJECTIVE
from tests.serving.access.test_access import SECRET


def objective(name: str, priority: object) -> str:
    return f"""
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {{name: {name}, namespace: models}}
spec:
  priority: {priority}
  poolRef: {{group: inference.networking.k8s.io, name: slipway}}
"""


def manifest(**priorities: object) -> str:
    """A file with objectives of these names."""
    return "---".join(objective(*it) for it in priorities.items())


NO_PRIORITY = "kind: InferenceObjective\nmetadata: {name: chat}\nspec: {poolRef: {name: a}}\n"


def test_a_manifest_is_read_as_people_write_it_and_as_kubectl_does():
    assert parsed(manifest(chat=5, batch=-10).encode()) == {"chat": 5, "batch": -10}
    assert parsed(f"---\n{NO_PRIORITY}---\n".encode()) == {"chat": 0}
    listed = "kind: List\nitems:\n- " + NO_PRIORITY.rstrip().replace("\n", "\n  ")
    assert parsed(listed.encode()) == {"chat": 0}
    assert parsed(b"") == {}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a: [", "it is not YAML"),
        ("\0", "it is not YAML"),
        ("!!bool a", "it is not YAML"),
        ("!!timestamp a", "it is not YAML"),
        ("[" * 5000, "it is not YAML"),
        ("chat", "it should have objects of the kind InferenceObjective"),
        ("kind: InferenceObjective\nspec: {priority: 1}", "missing required field `metadata`"),
        (manifest(chat="high"), "Expected `int`, got `str`"),
        (
            "kind: InferencePool\nmetadata: {name: a}",
            "a is of the kind InferencePool; it should be InferenceObjective",
        ),
        (objective("a", 1) + "---" + objective("a", 2), "two objectives are called a"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_name(tmp_path, content, fault):
    file = tmp_path / "objectives.yaml"
    file.write_text(content)
    settings = Settings(router_objectives=str(file), router_secret=SECRET)
    with pytest.raises(SettingsError, match="OPTION_ROUTER_OBJECTIVES=") as found:
        Objectives(settings)
    assert fault in str(found.value)


def test_it_needs_a_secret_and_a_file(tmp_path):
    with pytest.raises(SettingsError, match="needs OPTION_ROUTER_SECRET"):
        Objectives(Settings(router_objectives=str(tmp_path)))
    with pytest.raises(SettingsError, match="No such file"):
        Objectives(Settings(router_objectives=str(tmp_path / "a"), router_secret=SECRET))


def test_the_engines_order_is_the_other_way_round_and_a_keys_own_comes_first(tmp_path):
    file = tmp_path / "objectives.yaml"
    file.write_text(manifest(chat=5, batch=-10))
    found = Objectives(Settings(router_objectives=str(file), router_secret=SECRET))
    key = Caller(name="team-a", priority=3)
    applied = [
        found.applied(caller, {OBJECTIVE: name})
        for caller in (ANYBODY, key)
        for name in (b"chat", b"batch", b"\xff")
    ]
    assert [(it.priority, it.sheddable) for it in applied] == [
        *((-5, False), (10, True), (0, False)),
        *((3, False), (3, True), (3, False)),
    ]
    assert found.applied(key, {}) is key
