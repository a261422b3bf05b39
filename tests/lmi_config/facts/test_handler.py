# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from lmi_config.facts.handler import FILE, Service, look

LMIS = "djl_python.lmi_vllm.vllm_async_service"
COMPAT = Path(__file__).parents[2] / "compat"


@pytest.mark.parametrize(
    ("name", "entry_point", "service"),
    [
        ("public/globals_and_load", None, Service.ITS_OWN),
        ("public/own_engine", None, Service.EITHER),
        ("public/guard", None, Service.EITHER),
        ("public/guard", FILE, Service.ITS_OWN),
        ("public/guard", LMIS, Service.IN_FRONT),
        ("public/own_engine", LMIS, Service.IN_FRONT),
        ("public/globals_and_load", LMIS, Service.ITS_OWN),
        ("public/configured_formatter", FILE, Service.OURS),
        ("syntax_error", FILE, None),
        ("nothing", FILE, None),
    ],
)
def test_whose_the_service_is(name, entry_point, service):
    """tests/serving/server/test_own_engine.py checks the same for a server that has started."""
    assert look(COMPAT / name, entry_point) is service
