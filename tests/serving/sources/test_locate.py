# SPDX-License-Identifier: Apache-2.0
"""Which kind of source an id names; folders of this machine."""

import re

import pytest

from serving.sources.locate import locate
from serving.sources.source import SourceError
from tests.serving.sources.conftest import ignore

WANTED = "give a folder with a model, s3://bucket/prefix, or a hub id like Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("description", ["config.json", "params.json"])
def test_a_folder_is_served_where_it_is(tmp_path, monkeypatch, description):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / description).write_bytes(b"{}")
    folder.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model_id in (str(folder), "tiny", "./tiny", "~/tiny"):
        source = locate(model_id, {})
        assert source.fetch(ignore).samefile(folder)
        assert source.checkpoint().sizes == {description: 2}
        assert source.checkpoint().head(description, 1) == b"{"


@pytest.mark.parametrize(
    ("model_id", "fault"),
    [
        ("/no/model", "there is no such folder"),
        ("./model", "there is no such folder"),
        ("../model", "there is no such folder"),
        ("~nobody-here/model", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "there is no such folder"),
        ("a b", "it is neither a folder nor a hub id"),
        ("a--b", "it is neither a folder nor a hub id"),
        ("org/", "it is neither a folder nor a hub id"),
        ("s3://", "it names no bucket"),
        ("s3:///prefix", "it names no bucket"),
    ],
)
def test_what_cannot_be_a_model_is_refused_without_asking_anybody(model_id, fault):
    with pytest.raises(SourceError, match=f"^{re.escape(f'{model_id!r}: {fault}; {WANTED}')}$"):
        locate(model_id, {"HF_ENDPOINT": "http://not.asked.invalid"})
