# SPDX-License-Identifier: Apache-2.0
"""The options that the router and the copies of one container get."""

from pathlib import Path
from typing import Any

import pytest

from serving.access.access import Access
from serving.copies import divided
from serving.errors import Unauthorized
from serving.server.prepare import Deployment, Shared
from tests.lmi_config.examples import machine, model
from tests.lmi_config.plan.test_plan import planned

NO_SOURCE: Any = None
SHARED = Shared(folder=Path("/m"), draft=None, name=Path("/m"), without_tiers="")


def settings(**environ):
    """The router's settings, and those of the two copies."""
    made = planned({"OPTION_COPIES": "2", **environ}, machine(), model(2))
    secret = divided.secret(made.settings)
    copies = [
        divided.of_copy(Deployment(made, NO_SOURCE, None), it, secret, SHARED, Path("/ours"))
        for it in made.copies
    ]
    return divided.of_router(made.settings, divided.urls(made), secret), [
        it.plan.settings for it in copies
    ]


def test_a_copy_lets_nobody_in_but_its_router():
    router, copies = settings()
    for own in copies:
        access = Access(own)
        with pytest.raises(Unauthorized):
            access.caller([])
        assert access._signer
        names = (access._signer.name,)
        said = Access(router, routes=True).identity(Access(router, routes=True).caller([]), names)
        assert said
        assert access.caller([(b"x-slipway-identity", said)]).admin


def test_each_start_has_a_secret_of_its_own():
    assert settings()[0].router_secret != settings()[0].router_secret
    assert settings(OPTION_ROUTER_SECRET="s" * 40)[0].router_secret == "s" * 40


def test_keys_limits_and_tls_are_the_routers():
    router, copies = settings(OPTION_API_KEY="k" * 20, OPTION_TLS_CERT_FILE="/c")
    assert (router.api_key, router.tls_cert_file) == ("k" * 20, "/c")
    assert {(it.api_key, it.tls_cert_file, it.ui) for it in copies} == {(None, None, False)}


def test_copies_count_tokens_in_the_store_of_the_routers_limits():
    """A router does not know the tokens of an answer."""
    router, copies = settings(OPTION_LIMITS_URL="redis://here:6379")
    assert {router.limits_url, *(it.limits_url for it in copies)} == {"redis://here:6379"}


def test_the_queue_is_divided_and_ports_are_not_shared():
    _, copies = settings(SERVING_JOB_QUEUE_SIZE="5")
    assert [it.job_queue_size for it in copies] == [3, 3]
    assert len({it.port for it in copies}) == 2


def test_adapters_have_a_list_that_outlives_a_copy():
    assert settings()[1][0].adapter_list is None
    assert settings(OPTION_ENABLE_LORA="true")[1][0].adapter_list == "/ours/adapters"
    listed = {"OPTION_ENABLE_LORA": "true", "OPTION_ADAPTER_LIST": "/mine"}
    assert settings(**listed)[1][1].adapter_list == "/mine"
