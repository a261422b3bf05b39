# SPDX-License-Identifier: Apache-2.0
"""The load generator, on stub replicas in this process."""

import json

import pytest
import uvloop

from tests.support.harness import ports, stub_replica
from tools.bench.router import Failed, Load, Workload

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


def test_prompts_have_their_size_and_their_number_at_the_end():
    async def prompts(workload):
        load = Load(workload, 1)
        load.done.cancel()
        return [load.next() for _ in range(2)]

    for workload in (WHOLE, CHATS):
        heads, bodies = zip(
            *(it.split(b"\r\n\r\n") for it in uvloop.run(prompts(workload))), strict=True
        )
        assert all(
            b"content-length: %d\r\n" % len(body) in head + b"\r\n"
            for head, body in zip(heads, bodies, strict=True)
        )
        first, second = (json.loads(it)["messages"] for it in bodies)
        assert len(bodies[0]) == pytest.approx(workload.prompt, rel=0.3, abs=100)
        assert first[-1]["content"] != second[-1]["content"]
        assert len(first) == (40 if workload.chat else 1)


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
