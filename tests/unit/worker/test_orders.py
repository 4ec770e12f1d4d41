"""What ends a worker: one signal drains, two stop; a drain's limit is that of whoever ordered it first."""

import asyncio

from loopline.worker.orders import Orders


def test_the_second_signal_stops() -> None:
    async def main() -> None:
        orders = Orders(7.0)
        stopped = asyncio.ensure_future(orders.wait_stop())
        orders.terminate()
        assert await orders.wait_drain() == 7.0
        assert orders.is_draining and not stopped.done()
        orders.terminate()
        await stopped

    asyncio.run(main())


def test_the_first_signal_after_an_ordered_drain_does_not_stop() -> None:
    async def main() -> None:
        orders = Orders(7.0)
        stopped = asyncio.ensure_future(orders.wait_stop())
        orders.drain(0.5)
        orders.terminate()
        assert await orders.wait_drain() == 0.5
        assert not stopped.done()
        orders.terminate()
        await stopped

    asyncio.run(main())


def test_a_drain_message_brings_its_limit() -> None:
    async def main() -> None:
        orders = Orders(7.0)
        orders.drain(0.5)
        orders.drain(100.0)
        assert await orders.wait_drain() == 0.5

    asyncio.run(main())


def test_a_wish_to_be_started_again_is_a_drain_and_comes_too_late_after_one() -> None:
    async def main() -> None:
        orders = Orders(7.0)
        orders.restart("why")
        assert await orders.wait_drain() == 7.0 and orders.wants_restart
        leaving = Orders(7.0)
        leaving.drain(1.0)
        leaving.restart("why")
        assert not leaving.wants_restart

    asyncio.run(main())
