# SPDX-License-Identifier: Apache-2.0
"""docs/guides/migrating_from_lmi.md states the true effect of each option."""

import re
from pathlib import Path

import pytest

from lmi_config.options import settings
from lmi_config.options.ignored import UNUSED
from lmi_config.options.settings import SettingsError

PAGE = (Path(__file__).parent.parent / "docs/guides/migrating_from_lmi.md").read_text()
KEPT, _, REMOVED = PAGE.partition("## What was removed")
NAME = re.compile(r"`((?:OPTION|SERVING|SAGEMAKER|JAVA)_[A-Z_]+)[`=]")
TABLE = [line.split("|")[1] for line in REMOVED.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", [name for cell in TABLE for name in NAME.findall(cell)])
def test_what_was_removed_is_accepted_with_a_warning(name):
    assert any(name in note for note in settings.read({name: "1"}).notes)


@pytest.mark.parametrize("name", sorted({*NAME.findall(KEPT)}))
def test_no_other_option_that_it_names_does_nothing(name):
    assert name not in UNUSED


def test_what_plan_says_of_the_example():
    (given,) = re.findall(r"```properties\n(.*?)```", PAGE, re.DOTALL)
    (told,) = re.findall(r"it prints\n\n```console\n(.*?)```", PAGE, re.DOTALL)
    with pytest.raises(SettingsError) as found:
        settings.read(dict(line.split("=") for line in given.splitlines()))
    assert f"{found.value}\n" == told
