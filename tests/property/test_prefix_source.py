"""The way of a prompt is a function of the facts alone, and never one that cannot be taken."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.prefix_source import AUTO, Prompts, SourceFacts, SourceRule, estimated_s, least_fetch_tokens
from loopline.request import PrefixSource

CHOICES = (AUTO, *PrefixSource)
RATES = st.sampled_from((0.0, 10.0, 1e3, 1e6))


@st.composite
def facts(draw: st.DrawFn, needs_prefill: bool = False) -> SourceFacts:
    known = draw(st.integers(1, 400))

    def prompts() -> Prompts:
        return Prompts(
            token_loops_per_s=draw(RATES),
            ahead_token_loops=draw(st.integers(0, 5_000)),
            cached_tokens=draw(st.integers(0, known - 1)),
        )

    has_prefill = needs_prefill or draw(st.booleans())
    return SourceFacts(
        known_tokens=known,
        loops=draw(st.integers(1, 32)),
        token_bytes=draw(st.integers(1, 1 << 20)),
        decode=prompts(),
        prefill=prompts() if has_prefill else None,
        link_bytes_per_s=draw(st.sampled_from((0.0, 1e3, 1e6, 1e12))),
    )


@given(facts(), st.sampled_from(CHOICES), st.integers(0, 400))
def test_a_way_is_one_that_can_be_taken(given_facts: SourceFacts, choice: str, below: int) -> None:
    rule = SourceRule(choice=choice, local_below_tokens=below)
    way = rule.choose(given_facts)
    assert way == rule.choose(replace(given_facts)), "the same facts, another answer"
    has_prefill = given_facts.prefill is not None
    may_local = choice == PrefixSource.LOCAL or (choice == AUTO and given_facts.lacked_tokens < below)
    if way is None:
        assert not has_prefill and not may_local
    elif way is PrefixSource.LOCAL:
        assert may_local
    else:
        assert has_prefill and choice != PrefixSource.LOCAL
    if way is PrefixSource.FETCH:
        assert given_facts.fetchable_tokens > 0 and choice in (AUTO, PrefixSource.FETCH)
    if choice == PrefixSource.FETCH and has_prefill:
        assert way is (PrefixSource.FETCH if given_facts.fetchable_tokens else PrefixSource.RECOMPUTE)
    if choice == PrefixSource.RECOMPUTE and has_prefill:
        assert way is PrefixSource.RECOMPUTE


@given(facts(needs_prefill=True), st.integers(0, 400))
def test_auto_takes_the_least_estimate_of_those_that_may_be(given_facts: SourceFacts, below: int) -> None:
    way = SourceRule(local_below_tokens=below).choose(given_facts)
    estimates = estimated_s(given_facts)
    may = {PrefixSource.RECOMPUTE}
    may |= {PrefixSource.FETCH} if given_facts.fetchable_tokens else set()
    may |= {PrefixSource.LOCAL} if given_facts.lacked_tokens < below else set()
    if estimates is None:
        assert way is (PrefixSource.LOCAL if PrefixSource.LOCAL in may else PrefixSource.RECOMPUTE)
    else:
        assert way in may and estimates[way] == min(estimates[one] for one in may)


@given(facts(needs_prefill=True), st.sampled_from(CHOICES))
def test_what_is_fetched_at_least_is_worth_it(given_facts: SourceFacts, choice: str) -> None:
    """Where a fetch is chosen for as many tokens as are hoped for, it stays right for as few as the bound says."""
    least = least_fetch_tokens(choice, given_facts)
    assert least >= 1
    if choice != AUTO:
        assert least == 1
    elif SourceRule().choose(given_facts) is PrefixSource.FETCH:
        assert least <= given_facts.fetchable_tokens + 1, "but for rounding"


def test_what_moves_the_decision() -> None:
    """Ouro-1.4B's KV is 768 KiB a token; 1,000 tokens are cached at the decode worker, 64 are new."""
    rule = SourceRule(local_below_tokens=65)
    even = Prompts(token_loops_per_s=40_000.0, ahead_token_loops=0, cached_tokens=0)
    base = SourceFacts(
        known_tokens=1_064,
        loops=4,
        token_bytes=768 * 1024,
        decode=replace(even, cached_tokens=1_000),
        prefill=even,
        link_bytes_per_s=50e9,
    )
    assert rule.choose(base) is PrefixSource.LOCAL, "nothing has to be moved"
    busy = replace(base, decode=replace(base.decode, ahead_token_loops=4_000))
    assert rule.choose(busy) is PrefixSource.FETCH, "prompts wait at the decode worker"
    assert rule.choose(replace(busy, link_bytes_per_s=1e9)) is PrefixSource.LOCAL, "0.8 s to move what takes 0.1 s"
    assert SourceRule().choose(replace(busy, link_bytes_per_s=1e9)) is PrefixSource.RECOMPUTE
    warm = replace(busy, prefill=replace(even, cached_tokens=1_000))
    assert rule.choose(warm) is PrefixSource.RECOMPUTE, "the prefill worker has it all"
    assert rule.choose(replace(busy, prefill=None)) is PrefixSource.LOCAL
    assert SourceRule().choose(replace(busy, prefill=None)) is None
