# SPDX-License-Identifier: Apache-2.0
"""The load generator, with stub replicas in this process."""

import json

import pytest
import uvloop

from tests.support.harness import ports, stub_replica
from tests.support.harness.closed_loop import Failed
from tools.bench.router.__main__ import Load, Workload

STREAMS = Workload("two streams", 2, 150, rate=200)
WHOLE = Workload("whole answers", 2, 150)
CHATS = Workload("chats", 2, 32_000, chat=True)


def loaded(workload, connection=stub_replica.Connection, seconds=0.1):
    async def run():
        port = ports.free()
        replica = stub_replica.Replica(port, workload.rate or 50)
        server = await replica.loop.create_server(lambda: connection(replica), "127.0.0.1", port)
        async with server:
            return await Load(workload, seconds).run([port]), replica

    return uvloop.run(run())


def test_every_token_is_counted():
    (tokens, elapsed), replica = loaded(STREAMS)
    assert tokens == 2 * 20
    assert elapsed > 0.09
    assert not replica.left


def test_clients_ask_again_until_the_time_is_over():
    (requests, elapsed), replica = loaded(WHOLE)
    assert requests == replica.requests > 2
    assert elapsed >= 0.1


@pytest.mark.parametrize("workload", [WHOLE, CHATS])
def test_prompts_have_their_size_and_a_number_at_the_end(workload):
    async def requests():
        load = Load(workload, 1)
        return [load.request() for _ in range(2)]

    ends = set()
    for request in uvloop.run(requests()):
        head, body = request.split(b"\r\n\r\n")
        assert head.endswith(b"content-length: %d" % len(body))
        assert len(body) == pytest.approx(workload.prompt, rel=0.1, abs=110)
        messages = json.loads(body)["messages"]
        assert len(messages) == (40 if workload.chat else 1)
        ends.add(messages[-1]["content"][-8:])
    assert len(ends) == 2
    assert all(it.isdigit() for it in ends)


class Cut(stub_replica.Connection):
    def event(self, *, last):
        super().event(last=last)
        if self.replica.left[self] == 10:
            self.transport.close()


class Short(stub_replica.Connection):
    def event(self, *, last):
        super().event(last=last or self.replica.left[self] == 10)


class Missing(stub_replica.Connection):
    def on_message_complete(self):
        self.path = "/elsewhere"
        super().on_message_complete()


@pytest.mark.parametrize(
    ("workload", "connection", "told"),
    [
        (STREAMS, Cut, "a connection was cut"),
        (STREAMS, Short, "answer 200 with 12 of 21 events"),
        (WHOLE, Missing, "answer 404"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(workload, connection, told):
    with pytest.raises(Failed, match=told):
        loaded(workload, connection)
