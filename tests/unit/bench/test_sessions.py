"""Traces of sessions: what is drawn, what a file keeps, and what a conversation asks."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.bench.sessions import (
    Conversation,
    Session,
    SessionShape,
    Trace,
    Turn,
    draw_burst,
    draw_sessions,
    read_trace,
    write_trace,
)
from loopline.errors import ConfigError

HEAD = '{"kind": "loopline-sessions", "version": 1}'
TURN = '{"session": "a", "turn": 0, "tokens": 5, "answer": 2}'
VOCAB = 97

shapes = st.builds(
    SessionShape,
    sessions=st.integers(1, 5),
    turns=st.integers(1, 4),
    first=st.integers(1, 60),
    tool=st.integers(1, 30),
    answer=st.integers(1, 30),
    system=st.integers(0, 40),
    think_s=st.floats(0, 10),
    gap_s=st.floats(0, 10),
    sigma=st.sampled_from([0.0, 0.5]),
    drawn_times=st.booleans(),
    seed=st.integers(0, 2**20),
)


def _answer(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def _prompts(trace: Trace, salt: str = "") -> dict[str, list[tuple[int, ...]]]:
    """What all sessions ask when they are answered with the same tokens."""
    asked: dict[str, list[tuple[int, ...]]] = {}
    for session in trace.sessions:
        conversation = Conversation(trace, session, VOCAB, salt)
        while (turn := conversation.next_turn) is not None:
            asked.setdefault(session.name, []).append(conversation.ask())
            conversation.take(_answer(turn.answer_tokens, conversation.num_asked))
    return asked


@given(shapes)
def test_a_shape_gives_one_trace(shape: SessionShape) -> None:
    trace = draw_sessions(shape)
    assert trace == draw_sessions(shape)
    assert len(trace.sessions) == shape.sessions and trace.num_turns == shape.sessions * shape.turns
    turns = [turn for session in trace.sessions for turn in session.turns]
    assert all(turn.num_tokens >= 1 and turn.answer_tokens >= 1 and turn.wait_s >= 0 for turn in turns)
    if not shape.sigma:
        assert {turn.answer_tokens for turn in turns} == {shape.answer}
        assert [turn.num_tokens for turn in trace.sessions[0].turns] == [shape.first] + [shape.tool] * (shape.turns - 1)


@given(shapes)
def test_each_turn_sends_the_whole_conversation_again(shape: SessionShape) -> None:
    trace = draw_sessions(shape)
    asked = _prompts(trace)
    assert sum(len(prompt) for prompts in asked.values() for prompt in prompts) == trace.prompt_tokens
    beginnings = {prompts[0][: shape.system] for prompts in asked.values()}
    assert len(beginnings) == 1
    for session in trace.sessions:
        before: tuple[int, ...] = ()
        for index, prompt in enumerate(asked[session.name]):
            assert prompt[: len(before)] == before
            answer = _answer(session.turns[index].answer_tokens, index + 1)
            before = (*prompt, *answer)
            assert len(before) == shape.system + session.length_after(index)
    assert trace.longest == max(shape.system + one.length_after(len(one.turns) - 1) for one in trace.sessions)
    assert asked == _prompts(trace)


@given(shapes, st.sampled_from([1, 4, 16]))
def test_the_working_set_holds_every_conversation_to_its_end(shape: SessionShape, block_size: int) -> None:
    trace = draw_sessions(shape)
    common = shape.system // block_size
    blocks = {("common", index) for index in range(common)}
    for session in trace.sessions:
        positions = shape.system + session.length_after(len(session.turns)) - 1
        blocks |= {(session.name, index) for index in range(common, -(-positions // block_size))}
    assert trace.working_set_blocks(block_size) == len(blocks)


@given(shapes)
def test_a_file_keeps_a_trace(tmp_path_factory: pytest.TempPathFactory, shape: SessionShape) -> None:
    path, trace = tmp_path_factory.mktemp("traces") / "trace.jsonl", draw_sessions(shape)
    write_trace(trace, path)
    again = read_trace(path)
    assert replace(again, made_by={}) == replace(trace, made_by={})
    assert again.made_by["trace"] == str(path) and again.made_by["turns"] == shape.turns
    assert _prompts(again) == _prompts(trace)


def test_a_file_keeps_tokens_and_may_mix_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace((Session("a", (Turn(2, 3, 0.5, (200, 5)), Turn(4, 1))), Session("b", (Turn(1, 1),))))
    write_trace(trace, path)
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    assert "tokens" not in json.loads(lines[0])
    path.write_text("\n".join([head, lines[2], lines[0], "", lines[1]]), encoding="utf-8")
    assert {one.name: one for one in read_trace(path).sessions} == {one.name: one for one in trace.sessions}
    assert Conversation(trace, trace.sessions[0], VOCAB).ask() == (200 % VOCAB, 5)


def test_another_salt_and_another_seed_ask_for_other_tokens() -> None:
    trace = draw_sessions(SessionShape(sessions=2, turns=1))
    prompts = [_prompts(trace), _prompts(trace, "other"), _prompts(replace(trace, seed=1))]
    firsts = [one["s0"][0] for one in prompts] + [prompts[0]["s1"][0]]
    assert len(set(firsts)) == 4


def test_lengths_and_times_are_drawn_around_their_means() -> None:
    shape = SessionShape(sessions=40, turns=40, tool=100, answer=50, think_s=2.0, sigma=0.7, drawn_times=True)
    turns = [turn for session in draw_sessions(shape).sessions for turn in session.turns[1:]]
    assert mean(turn.num_tokens for turn in turns) == pytest.approx(100, rel=0.1)
    assert mean(turn.answer_tokens for turn in turns) == pytest.approx(50, rel=0.1)
    assert mean(turn.wait_s for turn in turns) == pytest.approx(2.0, rel=0.15)
    assert len({turn.num_tokens for turn in turns}) > 50


def test_a_burst_is_sessions_of_one_turn_at_once() -> None:
    trace = draw_burst(3, 20, 4)
    assert [one.turns for one in trace.sessions] == [(Turn(20, 4),)] * 3
    assert trace.prompt_tokens == 60 and trace.answer_tokens == 12


def test_a_trace_is_cut_by_turns() -> None:
    trace = draw_sessions(SessionShape(sessions=2, turns=3))
    assert trace.first_turns(2).num_turns == 4 and trace.first_turns(9) == trace


@pytest.mark.parametrize(
    "change",
    [
        {"sessions": 0},
        {"turns": 0},
        {"first": 0},
        {"answer": -1},
        {"system": -1},
        {"sigma": -0.5},
        {"sigma": 1e200},
        {"think_s": 1e400},
    ],
    ids=str,
)
def test_a_number_out_of_range_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        draw_sessions(replace(SessionShape(), **change))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ":1: no trace"),
        ("{}", ":1: no trace"),
        ("[1]", ":1: "),
        ("{", ":1: no JSON"),
        (HEAD, "no turn"),
        (HEAD.replace("1}", "2}"), ":1: version is 2; the one that is known here: 1"),
        (HEAD.replace(', "version": 1', ""), ":1: version is None"),
        (f'{HEAD[:-1]}, "sytem_tokens": 1}}', ":1: sytem_tokens is not known; allowed: kind, version, seed, system_to"),
        (f'{HEAD[:-1]}, "made_by": 3}}\n{TURN}', ":1: made_by is '3'"),
        (
            f'{HEAD}\n{TURN[:-1]}, "wait": 1.5}}',
            ":2: wait is not known; allowed: session, turn, wait_s, tokens, token_i",
        ),
        (f'{HEAD}\n{TURN[:-1]}, "token_ids": [1]}}', ":2: tokens and token_ids are both there"),
        (f'{HEAD}\n{{"session": "a", "turn": 0, "answer": 2}}', ":2: tokens is missing; allowed: "),
        (f'{HEAD[:-1]}, "system_tokens": -1}}\n{TURN}', "system_tokens is -1"),
        (f"{HEAD}\n{TURN}\n{TURN}", ":3: turn is 0; the next one of session a is 1"),
        (f"{HEAD}\n{TURN.replace('5', '0')}", ":2: tokens is 0"),
        (f"{HEAD}\n{TURN.replace('5', 'true')}", ":2: tokens is True"),
        (f'{HEAD}\n{{"session": "", "turn": 0}}', ":2: session is ''"),
        (f'{HEAD}\n{{"session": "\\ud800", "turn": 0}}', ":2: session is '\\ud800'"),
        (f'{HEAD}\n{{"session": "a", "turn": 0, "token_ids": [], "answer": 1}}', ":2: token_ids is"),
        (f'{HEAD}\n{{"session": "a", "turn": 0, "tokens": 1}}', ":2: answer is missing"),
        (f'{HEAD}\n{{"session": "a", "turn": 0, "wait_s": -1, "tokens": 1, "answer": 1}}', ":2: wait_s is -1"),
        (f'{HEAD}\n{TURN[:-1]}, "wait_s": {"9" * 400}}}', ":2: wait_s is 999"),
        (f'{HEAD}\n{TURN[:-1]}, "wait_s": NaN}}', ":2: wait_s is nan"),
        (f'{HEAD}\n{{"session": "a", "turn": 0, "token_ids": [true], "answer": 1}}', ":2: token_ids is"),
        (f"{HEAD}\n{'[' * 100_000}", ":2: no JSON"),
    ],
    ids=lambda text: text[:40],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert named in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{HEAD}\n".encode() + b'{"session": "\xe9"}')
    with pytest.raises(ConfigError, match=f"cannot be read: byte {len(HEAD) + 14} is no UTF-8"):
        read_trace(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
