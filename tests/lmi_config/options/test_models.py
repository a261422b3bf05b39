# SPDX-License-Identifier: Apache-2.0
"""Several models: the places that may list them, and their names."""

import json

import pytest

from lmi_config.options import arguments, settings
from lmi_config.options.settings import SettingsError

LISTED = """
max_model_len: 512
models:
  small: {model_id: /models/small, max_num_seqs: 4, pinned: true}
  org/large:
    model_id: s3://bucket/large/
"""
READ = {
    "small": {"model_id": "/models/small", "max_num_seqs": "4", "pinned": "true"},
    "org/large": {"model_id": "s3://bucket/large/"},
}


def faults(environ):
    with pytest.raises(SettingsError) as refused:
        settings.read(environ)
    return "; ".join(refused.value.faults)


def test_the_operators_file_lists_models_and_shared_options(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(LISTED)
    environ = {"OPTION_CONFIG_FILE": str(file)}
    found = settings.read(environ)
    assert found.models == READ
    assert found.max_model_len == 512
    assert settings.read(environ, within=True).models is None
    assert settings.read({"OPTION_MODELS": json.dumps(READ)}).models == READ
    argued = arguments.read("serve", ["--models", json.dumps(READ)])
    assert settings.read({}, argued).models == READ


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", ["slipway.yaml", "serving.properties"])
def test_a_models_own_file_may_not(tmp_path, name, within):
    text = LISTED if name.endswith("yaml") else 'option.models={"a": {}}'
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match="only be listed in the file that OPTION_CONFIG_FILE"):
        settings.read({"OPTION_MODEL_ID": str(tmp_path)}, within=within)


def test_a_store_with_several_models_is_no_fault_where_they_are_listed(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    environ = {"SERVING_MODEL_STORE": str(tmp_path)}
    assert "holds several models (a, b)" in faults(environ)
    listed = {"OPTION_MODELS": json.dumps({"a": {"model_id": str(tmp_path / "a")}})}
    assert settings.read(environ | listed).models
    assert settings.read(environ | {"SAGEMAKER_MULTI_MODEL": "true"}).multi_model


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[]", "should be a JSON object"),
        ('{"": {}}', "names of models"),
        ('{"a b": {}}', "names of models"),
        ('{"../a": {}}', "names of models"),
        (json.dumps({"a" * 129: {}}), "names of models"),
        ('{"a": "org/name"}', 'options for each model, like {"a": {"model_id"'),
        (json.dumps({f"m{n}": {} for n in range(65)}), "at most 64 models"),
    ],
)
def test_what_is_no_list_of_models(value, why):
    assert why in faults({"OPTION_MODELS": value})
