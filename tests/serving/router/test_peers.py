# SPDX-License-Identifier: Apache-2.0
"""The messages from one process of a router to the others."""

import pytest

from serving.cache_hints.intent import digest
from serving.router.peers import links
from serving.router.policy.policies import PrefixAware
from tests.serving.router.conftest import routing, whole
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

LONG = "word " * 1000


@pytest.fixture
def ends():
    """Both ends of the link between two processes."""
    found = links(2)
    yield found
    for sock in {it for end in found for it in (end.inbox, *end.outboxes)}:
        sock.close()


def begins(name):
    """An answer that says that a session has begun or ended."""

    async def answer(replica, asked, writer):
        header = f"X-Amzn-SageMaker-{name}-Session-Id: s-1"
        writer.write(whole(200, b"{}", f"{header}; Expires=2030" if name == "New" else header))

    return answer


async def test_what_begins_and_ends_in_one_process_does_so_in_the_others(ends):
    here, there = ends
    async with routing(2, link=here) as one:
        urls = ",".join(it.url for it in one.fleet)
        async with routing(0, wait=False, link=there, router_replicas=urls) as other:
            await other.ready(2)
            known = other.router.routing
            session, named = digest(None, "s"), {"X-Session-Id": "s"}
            await one.post({"prompt": LONG}, headers=named)
            await until_async(lambda: known.conversations.replica(session))
            await one.post({"prompt": LONG}, headers={**named, "X-Slipway-Session-Final": "true"})
            await until_async(lambda: not known.conversations.replica(session))
            for it in one.fleet:
                it.answer = begins("New")
            await one.post({"requestType": "NEW_SESSION"}, "/invocations")
            session = digest(None, "s-1")
            await until_async(lambda: known.affinity.replica(session))
            for it in one.fleet:
                it.answer = begins("Closed")
            await one.post({"inputs": "Hi"}, "/invocations")
            await until_async(lambda: not known.affinity.replica(session))


async def test_what_replicas_have_is_not_kept_where_they_are_unknown(ends):
    """A replica can be gone here while the other process still sends requests to it."""
    here, there = ends
    async with routing(2, link=here) as one:
        urls = one.fleet[0].url
        async with routing(0, wait=False, link=there, router_replicas=urls) as other:
            await other.ready(1)
            for n in range(8):
                named = {"X-Session-Id": f"s{n}"}
                await one.post({"prompt": f"{n} {LONG}"}, headers=named)
            assert all(it.asked for it in one.fleet)
            known = other.router.routing
            last = [digest(None, f"s{n}") for n in (6, 7)]
            await until_async(lambda: any(map(known.conversations.replica, last)))
            assert isinstance(known.policy, PrefixAware)
            assert {*known.policy.index._caches} == {urls}
