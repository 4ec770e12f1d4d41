"""What the coordinator knows of prefix caches: reports of a real index, whole, in parts, with gaps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies import PrefixAware
from coordinator.prefixes import PrefixTable, RequestPrefixes
from coordinator.registry import Registry
from coordinator.router import Router
from loopline.identity import Role, WorkerId
from loopline.kv.digests import BlockDigests, noise_root
from loopline.kv.prefix_index import PrefixIndex
from loopline.messages import CUT_DIGEST_BYTES, PairReady, PrefixReport, ReportPrefixes
from loopline.noise_key import NO_NOISE
from loopline.worker import prefix_reporter
from loopline.worker.prefix_reporter import PrefixReporter
from tests.unit.coordinator.builders import FINGERPRINT, OTHER_FINGERPRINT, assigned, register, request

WORKER = WorkerId("uuid", 1)
MOST = 10_000


def chain(length: int, first: int = 0) -> list[bytes]:
    blocks = BlockDigests(b"root", 1)
    blocks.extend(range(first, first + length))
    return list(blocks.digests)


def cut(digests: Sequence[bytes]) -> list[bytes]:
    return [digest[:CUT_DIGEST_BYTES] for digest in digests]


def publish(index: PrefixIndex, digests: Sequence[bytes], first_block: int = 0) -> None:
    for number, digest in enumerate(digests):
        index.publish(digest, digests[number - 1] if number else None, first_block + number)


def evict_all(index: PrefixIndex, blocks: range) -> None:
    for block in reversed(blocks):
        index.unpin(block, 1)
    for _ in blocks:
        index.evict()


def test_what_a_worker_reports_is_known_until_it_evicts_it() -> None:
    index, table, sent = PrefixIndex(), PrefixTable(), list[PrefixReport]()
    reporter = PrefixReporter(index, sent.append)
    digests = chain(5)
    publish(index, digests[:2])
    reporter.maybe_report(0.0, busy=False)
    assert not sent  # nobody has asked
    table.joined(WORKER, MOST, 0.0)
    reporter.ask()
    publish(index, digests)
    reporter.maybe_report(0.0, busy=False)
    assert [(one.number, one.is_whole) for one in sent] == [(1, True), (2, False)]
    assert not any(table.take(WORKER, one, 0.0) for one in sent)
    assert table.num_cached(WORKER, cut(digests)) == 5
    assert table.num_cached(WORKER, cut(chain(3, first=7))) == 0
    assert table.num_cached(WorkerId("other", 1), cut(digests)) == 0
    for block in reversed(range(5)):
        index.unpin(block, 1)
    index.evict()
    reporter.maybe_report(0.0, busy=True)  # it has said something just now
    assert len(sent) == 2
    reporter.maybe_report(0.0, busy=False)
    assert not table.take(WORKER, sent[-1], 0.0)
    assert table.num_cached(WORKER, cut(digests)) == 4
    reporter.stop()
    index.evict()
    reporter.maybe_report(1.0, busy=False)
    assert len(sent) == 3


def test_a_gap_asks_for_all_of_it_once_and_again_where_no_answer_comes() -> None:
    index, table, sent = PrefixIndex(), PrefixTable(), list[PrefixReport]()
    reporter = PrefixReporter(index, sent.append)
    table.joined(WORKER, MOST, 0.0)
    reporter.ask()
    for number in range(4):
        publish(index, chain(1, first=10 * number), first_block=number)
        reporter.maybe_report(float(number), busy=False)
    whole, first, _, third, fourth = sent
    assert not table.take(WORKER, whole, 0.0) and not table.take(WORKER, first, 0.0)
    assert table.take(WORKER, third, 1.0)  # the second was lost
    assert not table.take(WORKER, fourth, 1.0)  # it has been asked
    assert table.take(WORKER, fourth, 7.0)
    reporter.ask()
    assert not table.take(WORKER, sent[-1], 7.0)
    assert all(table.num_cached(WORKER, cut(chain(1, first=10 * number))) for number in range(4))
    assert table.num_known(WORKER) == 4


@given(data=st.data())
def test_whatever_happens_to_reports_the_table_comes_to_know_the_cache(data: st.DataObject) -> None:
    """Reports are lost at will, in parts of two digests; at the end a whole one comes through."""
    index, table, sent = PrefixIndex(max_pending=5), PrefixTable(), list[PrefixReport]()
    reporter = PrefixReporter(index, sent.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_reporter, "_PART_DIGESTS", 2)
        table.joined(WORKER, MOST, 0.0)
        reporter.ask()
        for number in range(data.draw(st.integers(1, 6))):
            length = data.draw(st.integers(1, 4))
            blocks = range(10 * number, 10 * number + length)
            publish(index, chain(length, first=100 * number), first_block=blocks.start)
            if data.draw(st.booleans()):
                evict_all(index, blocks)
            reporter.maybe_report(float(number), busy=False)
            for report in sent:
                if data.draw(st.integers(0, 3)) and table.take(WORKER, report, 100.0 * number):
                    sent = []
                    reporter = PrefixReporter(index, sent.append)
                    reporter.ask()
                    break
            sent.clear()
        reporter = PrefixReporter(index, sent.append)
        reporter.ask()
        assert not any(table.take(WORKER, report, 1e6) for report in sent)
    _, cached = index.snapshot()
    assert table.num_known(WORKER) == len(cached)
    for number in range(6):
        assert table.num_cached(WORKER, cut(chain(4, first=100 * number))) == len(index.match(chain(4, 100 * number)))


def test_garbage_and_more_than_an_arena_holds_are_not_kept() -> None:
    table = PrefixTable()
    table.joined(WORKER, 3, 0.0)
    table.take(WORKER, PrefixReport(0, True, 0, 1, b"".join(cut(chain(9))), b""), 0.0)
    assert table.num_known(WORKER) == 3
    for wrong in (PrefixReport(1, False, 0, 1, b"odd", b""), PrefixReport(1, False, 1, 1, b"", b"")):
        assert table.take(WORKER, wrong, 10.0)
        table.take(WORKER, PrefixReport(0, True, 0, 1, b"", b""), 10.0)
    table.lost(WORKER)
    assert table.num_known(WORKER) == 0 and not table.take(WORKER, PrefixReport(1, False, 0, 1, b"", b""), 0.0)


def test_digests_of_a_request_are_those_of_the_workers_and_made_once() -> None:
    one, prefixes = request(prompt=40), RequestPrefixes()
    digests = prefixes.digests(one, FINGERPRINT, 16)
    blocks = BlockDigests(noise_root(FINGERPRINT, one.params.loops, NO_NOISE), 16)
    blocks.extend(one.prompt_ids)
    assert list(digests) == cut(blocks.digests) and len(digests) == 2
    assert prefixes.digests(one, FINGERPRINT, 16) is digests
    assert set(prefixes.digests(one, OTHER_FINGERPRINT, 16)).isdisjoint(digests)
    assert len(prefixes.digests(replace(one, generated_ids=tuple(range(8))), FINGERPRINT, 16)) == 3
    prefixes.ended("r1")
    assert not len(prefixes)


def test_a_cached_prefix_is_weighed_against_work() -> None:
    """33 tokens at depth 2: 66 token-loops, or 2 where two blocks of 16 are cached."""
    workers = [register(name, Role(name.split("-")[0])) for name in ("prefill-0", "prefill-1", "decode-0")]
    registry, router = Registry(3.0), Router(PrefixAware())
    for one in workers:
        registry.join(one, 0.0)
        assert [send.message for send in router.joined(one, 0.0)] == [ReportPrefixes()]
    first, second, decode = (one.peer.worker for one in workers)
    for prefill in (first, second):
        registry.pair_ready(prefill, PairReady(decode, "tcp", 1.0))
    one = request(prompt=33)
    held = b"".join(RequestPrefixes().digests(one, FINGERPRINT, 16))
    router.reported(second, PrefixReport(0, True, 0, 1, held, b""), 0.0)
    for work, expected in ((0, second), (63, second), (65, first)):
        table = {second: (assigned("a", token_loops=work),)}
        placing = router.begin(registry.snapshot(0.0, table), 0.0)
        view = placing.choose_prefill(one, decode)
        assert view is not None and view.worker == expected
        assert placing.cached_tokens(one, view) == (32 if expected == second else 0)
