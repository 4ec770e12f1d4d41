import asyncio

from coordinator.effects import Ending, Outcome
from coordinator.streams import ClientStream, Finish, Taken, Tokens, WorkerStream
from loopline.identity import Cause, HandoffKey
from loopline.messages import Cancel
from loopline.request import FinishReason, Route, Timing, Usage
from loopline.text import TextStream
from tests.unit.coordinator.builders import row

LETTERS = tuple(bytes([byte]) for byte in range(256))


def outcome(reason: FinishReason = FinishReason.LENGTH) -> Outcome:
    return Outcome(
        ending=Ending.FINISHED,
        reason=reason,
        detail="",
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        timing=Timing(),
        route=Route(),
        stats=None,
    )


def test_a_slow_reader_finds_everything_in_one_event() -> None:
    async def main() -> None:
        stream = ClientStream(TextStream(LETTERS), 9)
        for position, letter in enumerate(b"abc"):
            assert Taken.OPEN is stream.push(row("r1", position, letter))
        stream.end(outcome())
        event = await stream.next_event()
        assert isinstance(event, Tokens)
        assert (len(event.rows), event.text) == (3, "abc")
        assert isinstance(await stream.next_event(), Finish)

    asyncio.run(main())


def test_much_that_was_kept_comes_in_several_events() -> None:
    async def main() -> None:
        stream = ClientStream(TextStream(LETTERS), 600)
        for position in range(600):
            stream.push(row("r1", position, ord("a")))
        stream.end(outcome())
        events = [await stream.next_event() for _ in range(3)]
        assert [len(event.rows) for event in events if isinstance(event, Tokens)] == [256, 256, 88]
        assert "".join(event.text for event in events if isinstance(event, Tokens)) == "a" * 600
        assert isinstance(await stream.next_event(), Finish)

    asyncio.run(main())


def test_a_character_in_pieces_waits_for_its_last_byte() -> None:
    async def main() -> None:
        stream = ClientStream(TextStream(LETTERS), 9)
        texts = []
        for position, byte in enumerate("é".encode()):
            stream.push(row("r1", position, byte))
            event = await stream.next_event()
            assert isinstance(event, Tokens)
            texts.append(event.text)
        assert texts == ["", "é"]

    asyncio.run(main())


def test_nothing_comes_after_a_stop_string_but_the_end() -> None:
    async def main() -> None:
        stream = ClientStream(TextStream(LETTERS, ["bc"]), 9)
        assert [stream.push(row("r1", position, letter)) for position, letter in enumerate(b"abcd")] == [
            Taken.OPEN,
            Taken.OPEN,
            Taken.STOPPED,
            Taken.OPEN,
        ]
        stream.end(outcome(FinishReason.LENGTH))  # the worker's own end was quicker
        event = await stream.next_event()
        assert isinstance(event, Tokens) and (len(event.rows), event.text) == (3, "a")
        end = await stream.next_event()
        assert isinstance(end, Finish) and (end.outcome.reason, end.text) == (FinishReason.STOP, "")

    asyncio.run(main())


def test_past_its_bound_the_buffer_asks_for_the_end() -> None:
    async def main() -> None:
        stream = ClientStream(None, 2)
        said = [stream.push(row("r1", position, 7)) for position in range(2)]
        assert said == [Taken.OPEN, Taken.OPEN]
        assert isinstance(await stream.next_event(), Tokens) and stream.num_unread == 0
        said = [stream.push(row("r1", position, 7)) for position in range(2, 5)]
        assert said == [Taken.OPEN, Taken.OPEN, Taken.UNREAD]
        event = await stream.next_event()
        assert isinstance(event, Tokens) and len(event.rows) == 3  # none is lost

    asyncio.run(main())


def test_without_a_tokenizer_there_is_no_text() -> None:
    async def main() -> None:
        stream = ClientStream(None, 9)
        waiter = asyncio.ensure_future(stream.next_event())
        await asyncio.sleep(0)
        stream.push(row("r1", 0, 7))
        event = await waiter
        assert isinstance(event, Tokens) and event.text == ""
        stream.end(outcome())
        assert await stream.next_event() == Finish(outcome(), None)

    asyncio.run(main())


def test_a_workers_stream_keeps_order_and_ends_after_what_was_sent() -> None:
    async def main() -> None:
        stream = WorkerStream()
        first, second = (Cancel(HandoffKey("r1", number), Cause.CANCELLED) for number in (1, 2))
        waiter = asyncio.ensure_future(stream.next_message())
        await asyncio.sleep(0)
        stream.send(first)
        assert await waiter == first
        stream.send(second)
        stream.close()
        stream.send(first)  # too late
        assert await stream.next_message() == second
        assert await stream.next_message() is None

    asyncio.run(main())
