# SPDX-License-Identifier: Apache-2.0
"""A request's early end: the first cause wins, everybody gets it, and all tasks end."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cancellation import Cancellation, ClientLeft
from serving.errors import NotReady, ServingError, TimedOut
from tests.fuzzing import examples

pytestmark = pytest.mark.anyio


class Walk:
    """A cancellation, the tasks that wait under it, and the expected end of each."""

    def __init__(self) -> None:
        self.whole = Cancellation()
        self.waits: list[tuple[asyncio.Future[int], asyncio.Task[object]]] = []
        self.ends: list[object] = []
        self.cleaned = 0

    async def _raising(self, needed: "asyncio.Future[int]", inside: bool) -> object:
        try:
            if inside:
                with self.whole.part() as part, part.raising():
                    return await needed
            with self.whole.raising():
                return await needed
        except (ServingError, ClientLeft) as error:
            await asyncio.sleep(0)  # the clean-up may await: one end of it is enough
            return error
        finally:
            self.cleaned += 1

    async def _engine(self) -> object:
        await self.whole.heard()
        return self.whole.cause

    def wait(self, kind: str) -> None:
        needed = asyncio.get_running_loop().create_future()
        made = self._engine() if kind == "engine" else self._raising(needed, kind == "part")
        self.waits.append((needed, asyncio.ensure_future(made)))
        self.ends.append(None)

    def end(self, number: int, value: object) -> None:
        if self.ends[number] is None:
            self.ends[number] = value

    def cause(self, error: ServingError | ClientLeft) -> None:
        self.whole.cancel(error)
        for number in range(len(self.waits)):
            self.end(number, self.whole.cause)


STEP = st.tuples(
    st.sampled_from(["raising", "part", "engine", "result", "cancel", "cause", "turn"]),
    st.integers(0, 99),
)


@examples(300)
@given(st.lists(STEP, max_size=40))
def test_causes_at_random(steps):
    async def walk():
        it = Walk()
        causes: list[ServingError | ClientLeft] = [
            ClientLeft(),
            TimedOut(1),
            NotReady("the server is stopping"),
        ]
        for step, which in steps:
            if step in ("raising", "part", "engine"):
                it.wait(step)
                await asyncio.sleep(0)  # it waits now
                if it.whole.cause:
                    it.end(len(it.waits) - 1, it.whole.cause)
            elif step == "cause":
                it.cause(causes[which % 3])
            elif step == "turn":
                await asyncio.sleep(0)
            elif it.waits:
                number = which % len(it.waits)
                needed, task = it.waits[number]
                if step == "result" and not needed.done() and it.ends[number] is None:
                    # A cause wins if it comes before the result is taken, so these turns are apart.
                    needed.set_result(number)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    if task.done():
                        it.end(number, number)
                elif step == "cancel" and not task.done() and it.ends[number] is None:
                    task.cancel()
                    it.end(number, "cancelled")
        it.cause(causes[0])
        done = await asyncio.gather(*(task for _, task in it.waits), return_exceptions=True)
        for end, found in zip(it.ends, done, strict=True):
            if end == "cancelled":
                assert isinstance(found, asyncio.CancelledError)
            else:
                assert found is end or found == end
        assert not it.whole._listeners
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(walk())


async def test_a_deadline_counts_from_the_beginning_and_may_be_moved():
    loop = asyncio.get_running_loop()
    cancellation = Cancellation(loop.time() - 100)
    cancellation.end_after(1000)
    assert 899 < (cancellation.time_left(1000) or 0) <= 900
    cancellation.end_after(None)
    cancellation.end_after(100)
    with pytest.raises(TimedOut, match="longer than 100 s"), cancellation.raising():
        await loop.create_future()
    assert cancellation.time_left(None) is None


async def test_a_part_has_a_deadline_of_its_own():
    cancellation = Cancellation(asyncio.get_running_loop().time() - 100)
    with cancellation.part() as part:
        part.end_after(100)
        await asyncio.sleep(0)
        assert part.cause is None
        part.cancel(ClientLeft())
    assert cancellation.cause is None
    cancellation.cancel(NotReady("the server is stopping"))
    with cancellation.part() as part, pytest.raises(NotReady), part.raising():
        pass


async def test_others_may_cancel_the_task_too():
    cancellation = Cancellation()

    async def work():
        with cancellation.raising():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    cancellation.cancel(ClientLeft())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_within_is_no_cause():
    cancellation = Cancellation()
    with cancellation.raising(), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.get_running_loop().create_future()
    assert cancellation.cause is None
