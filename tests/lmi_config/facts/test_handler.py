# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from lmi_config.facts.handler import Service, look

COMPAT = Path(__file__).parents[2] / "compat"


@pytest.mark.parametrize(
    ("name", "named", "service"),
    [
        ("public/globals_and_load", False, Service.ITS_OWN),
        ("public/own_engine", False, Service.EITHER),
        ("public/guard", False, Service.EITHER),
        ("public/guard", True, Service.ITS_OWN),
        ("public/configured_formatter", True, Service.OURS),
        ("syntax_error", True, None),
        ("nothing", True, None),
    ],
)
def test_whose_the_service_is(name, named, service):
    """As tests/serving/server/test_own_engine.py has it of a server that has started."""
    assert look(COMPAT / name, named) is service
