"""A prefill and a decode worker's cores in one thread, with real engines, real copies (local transport) and every
message in a queue that the test delivers when it likes. Nothing runs by itself.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from decode_worker.handoff_in import DecodePorts, HandoffIn
from decode_worker.policy import DecodePolicy
from kvtransfer.commands import (
    Close,
    Command,
    CommitHandoff,
    ConnectPeer,
    Event,
    OpenHandoff,
    Push,
    Quiesce,
    RemovePeer,
)
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.receiver import Receiver
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.sender import Sender
from loopline.clock import Clock, MonotonicClock
from loopline.engine.engine import Engine
from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import CloseHandoff, CloseState, Commit, CommitAnswer, HandoffClosed, WorkerMessage
from loopline.settings import EngineSettings, SchedulerSettings
from loopline.wire.convert import decode_push_notice, encode_push_notice
from loopline.worker.events import (
    CloseAsked,
    CommitAnswered,
    CommitReceived,
    CommitUndelivered,
    FetchAsked,
    PrefixAnswered,
    WriterClosed,
)
from prefill_worker.fetch_in import Wanted
from prefill_worker.handoff_out import HandoffOut
from prefill_worker.outgoing import PrefillPorts
from prefill_worker.policy import PrefillPolicy
from tests.support.golden import GOLDEN

BLOCK_SIZE = 4
PUSH_TIMEOUT_S = 60.0


def make_engines(
    num_blocks: int = 24, chunk_tokens: int = 8, decode_shares: bool = True, base: EngineSettings | None = None
) -> tuple[Engine, Engine]:
    """A prefill and a decode engine, reusable by many Pairs, one after the other.
    `decode_shares`: the decode worker has a prefix cache, so that of a prompt that it knows only a part is handed off.
    `base`: the model's settings; None: a tiny random Ouro's.
    """
    scheduler = SchedulerSettings(max_running=4, chunk_tokens=chunk_tokens)
    base = base or EngineSettings(model_path=str(GOLDEN / "ouro_fp32"))
    settings = replace(base, block_size=BLOCK_SIZE, num_blocks=num_blocks, scheduler=scheduler)
    return Engine(settings, PrefillPolicy()), Engine(settings, DecodePolicy(shares_prefixes=decode_shares))


def span_of(engine: Engine) -> ArenaSpan:
    return ArenaSpan(
        base_address=engine.arena.base_address,
        block_bytes=engine.layout.block_bytes,
        num_blocks=engine.arena.num_blocks,
        null_block=engine.arena.null_block,
    )


@dataclass
class Channels:
    """Everything that is on its way. Each deque is one ordered channel; commits, closes and fetches are unordered
    lists. Closes are of handoffs, `fetch_closes` of fetches."""

    from_prefill: deque[WorkerMessage] = field(default_factory=deque)
    from_decode: deque[WorkerMessage] = field(default_factory=deque)
    commands: deque[Command] = field(default_factory=deque)
    decode_commands: deque[Command] = field(default_factory=deque)
    commits: list[Commit] = field(default_factory=list)
    closes: list[HandoffKey] = field(default_factory=list)
    close_answers: list[HandoffClosed] = field(default_factory=list)
    fetches: list[FetchPrefix] = field(default_factory=list)
    fetch_answers: list[PrefixSent] = field(default_factory=list)
    fetch_closes: list[HandoffKey] = field(default_factory=list)
    fetch_close_answers: list[HandoffClosed] = field(default_factory=list)
    prefill_events: deque[Event] = field(default_factory=deque)
    decode_events: deque[Event] = field(default_factory=deque)


class Pair:
    """Both cores and what lies between them."""

    def __init__(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        name: str,
        clock: Clock | None = None,
        verify: bool = False,
    ) -> None:
        """`verify`: pushes carry a digest."""
        self.prefill_engine, self.decode_engine = prefill_engine, decode_engine
        self.channels = Channels()
        self.prefill_peer = Peer(WorkerId(f"{name}-p", 1), "prefill-0", "nowhere:1")
        self.decode_peer = Peer(WorkerId(f"{name}-d", 1), "decode-0", "nowhere:2")
        hub = LocalHub()
        self.clock = clock = clock or MonotonicClock()
        self._prefill_agent = LocalAgent(self.prefill_peer.worker.agent_name, hub)
        self._decode_agent = LocalAgent(self.decode_peer.worker.agent_name, hub)
        self._source = source = RegisteredRegion(self._prefill_agent, span_of(prefill_engine)).manifest
        target = RegisteredRegion(self._decode_agent, span_of(decode_engine)).manifest
        self.sender = Sender(
            self._prefill_agent,
            source,
            encode_push_notice,
            PUSH_TIMEOUT_S,
            clock,
            self.channels.prefill_events.append,
            read_blocks=prefill_engine.arena.read_blocks if verify else None,
        )
        self.receiver = Receiver(self._decode_agent, decode_push_notice, clock, self.channels.decode_events.append)
        self.decode_sender = Sender(
            self._decode_agent,
            target,
            encode_push_notice,
            PUSH_TIMEOUT_S,
            clock,
            self.channels.decode_events.append,
            read_blocks=decode_engine.arena.read_blocks if verify else None,
        )
        self.prefill_receiver = Receiver(
            self._prefill_agent, decode_push_notice, clock, self.channels.prefill_events.append
        )
        self._make_cores()
        self._connect(target)

    def _make_cores(self) -> None:
        self.prefill = HandoffOut(
            self.prefill_engine,
            PrefillPorts(
                to_coordinator=self.channels.from_prefill.append,
                to_transfer=self.channels.commands.append,
                deliver_commit=lambda peer, commit: self.channels.commits.append(commit),
                ask_prefix=self._ask_prefix,
                ask_close=lambda key, writer: self.channels.fetch_closes.append(key),
                identity=lambda: self.prefill_peer.worker,
            ),
            self.clock,
            push_timeout_s=PUSH_TIMEOUT_S,
        )
        self.decode = HandoffIn(
            self.decode_engine,
            DecodePorts(
                to_coordinator=self.channels.from_decode.append,
                to_transfer=self.channels.decode_commands.append,
                ask_close=lambda key, writer: self.channels.closes.append(key),
                identity=lambda: self.decode_peer.worker,
            ),
            self.clock,
            PUSH_TIMEOUT_S,
        )

    def _ask_prefix(self, source: Peer, wanted: Wanted) -> None:
        metadata = self._prefill_agent.metadata()
        key, first, runs, limit_s = wanted.key, wanted.first_block, wanted.runs, wanted.limit_s
        fetch = FetchPrefix(key, self.prefill_peer, metadata, self._source, first, runs, limit_s)
        self.channels.fetches.append(fetch)

    def _connect(self, target: RegionManifest) -> None:
        self.sender.connect(ConnectPeer(self.decode_peer, self._decode_agent.metadata(), target))
        for _ in range(8):
            self.poll_receiver()
            self.poll_sender()
        self.deliver_prefill_events()
        ready = self.channels.from_prefill.popleft()
        assert type(ready).__name__ == "PairReady", ready

    # ---- one thing at a time; each returns whether there was anything to do

    def step_prefill(self) -> bool:
        outcome = self.prefill_engine.step()
        if outcome is not None:
            self.prefill.stepped(outcome)
        return outcome is not None

    def step_decode(self) -> bool:
        outcome = self.decode_engine.step()
        if outcome is not None:
            self.decode.stepped(outcome)
        return outcome is not None

    def carry_out_command(self) -> bool:
        """The prefill worker's transfer thread takes one command."""
        return _carry_out(self.channels.commands, self.sender, self.prefill_receiver)

    def carry_out_decode_command(self) -> bool:
        """The decode worker's does."""
        return _carry_out(self.channels.decode_commands, self.decode_sender, self.receiver)

    def poll_sender(self) -> bool:
        return self.sender.poll()

    def poll_receiver(self) -> bool:
        return self.receiver.poll()

    def poll_decode_sender(self) -> bool:
        return self.decode_sender.poll()

    def poll_prefill_receiver(self) -> bool:
        return self.prefill_receiver.poll()

    def deliver_fetch(self, index: int = 0) -> bool:
        """Bring one FetchPrefix over, or an answer back."""
        answers = self.channels.fetch_answers
        if answers:
            self.prefill.handle(PrefixAnswered(answers.pop(index % len(answers))))
            return True
        if not self.channels.fetches:
            return False
        fetch = self.channels.fetches.pop(index % len(self.channels.fetches))
        self.decode.handle(FetchAsked(fetch, answers.append))
        return True

    def lose_fetch(self, index: int = 0) -> bool:
        """One FetchPrefix never arrives; whoever asked hears that."""
        if not self.channels.fetches:
            return False
        fetch = self.channels.fetches.pop(index % len(self.channels.fetches))
        writer = self.decode_peer.worker
        self.prefill.handle(PrefixAnswered(PrefixSent(fetch.key, writer, cause=Cause.PEER_LOST, detail="lost")))
        return True

    def lose_fetch_answer(self, index: int = 0) -> bool:
        """One answer never arrives, and nobody says so."""
        answers = self.channels.fetch_answers
        return bool(answers) and answers.pop(index % len(answers)) is not None

    def deliver_fetch_close(self, index: int = 0) -> bool:
        """The same as `deliver_close`, of a fetch: the prefill worker asks the decode worker."""
        answers = self.channels.fetch_close_answers
        if answers:
            closed = answers.pop(index % len(answers))
            if closed.state is not CloseState.PENDING:
                self.prefill.handle(WriterClosed(closed.key, self.decode_peer.worker, closed.state))
            return True
        if not self.channels.fetch_closes:
            return False
        key = self.channels.fetch_closes.pop(index % len(self.channels.fetch_closes))
        self.decode.handle(CloseAsked(CloseHandoff(key, self.decode_peer.worker), answers.append))
        return True

    def deliver_prefill_events(self) -> bool:
        return self._deliver(self.channels.prefill_events, self.prefill)

    def deliver_decode_events(self) -> bool:
        return self._deliver(self.channels.decode_events, self.decode)

    def _deliver(self, events: deque[Event], core: HandoffOut | HandoffIn) -> bool:
        if not events:
            return False
        core.handle(events.popleft())
        return True

    def deliver_commit(self, index: int = 0, repeat: bool = False, answer_is_lost: bool = False) -> list[CommitAnswer]:
        """Bring one commit over and its answer back; kept for another delivery if `repeat`."""
        if not self.channels.commits:
            return []
        at = index % len(self.channels.commits)
        commit = self.channels.commits[at] if repeat else self.channels.commits.pop(at)
        answers: list[CommitAnswer] = []
        self.decode.handle(CommitReceived(commit, answers.append))
        if answer_is_lost:
            self.prefill.handle(CommitUndelivered(commit.key, "the test lost the answer"))
        else:
            self.prefill.handle(CommitAnswered(commit.key, answers[0].cause, "decode-0"))
        return answers

    def lose_commit(self, index: int = 0) -> bool:
        """One commit never arrives."""
        if not self.channels.commits:
            return False
        commit = self.channels.commits.pop(index % len(self.channels.commits))
        self.prefill.handle(CommitUndelivered(commit.key, "the test lost the commit"))
        return True

    def deliver_close(self, index: int = 0) -> bool:
        """Bring one CloseHandoff over, or a closed writer's answer back."""
        if self.channels.close_answers:
            closed = self.channels.close_answers.pop(index % len(self.channels.close_answers))
            if closed.state is not CloseState.PENDING:
                self.decode.handle(WriterClosed(closed.key, self.prefill_peer.worker, closed.state))
            return True
        if not self.channels.closes:
            return False
        key = self.channels.closes.pop(index % len(self.channels.closes))
        close = CloseHandoff(key, self.prefill_peer.worker)
        self.prefill.handle(CloseAsked(close, self.channels.close_answers.append))
        return True

    def settle(self, limit: int = 10_000) -> None:
        """Deliver everything, fairly, until nothing is left to do."""
        for _ in range(limit):
            moved = [
                self.carry_out_command(),
                self.carry_out_decode_command(),
                self.poll_receiver(),
                self.poll_sender(),
                self.poll_prefill_receiver(),
                self.poll_decode_sender(),
                self.deliver_prefill_events(),
                self.deliver_decode_events(),
                bool(self.deliver_commit()),
                self.deliver_close(),
                self.deliver_fetch(),
                self.deliver_fetch_close(),
                self.step_prefill(),
                self.step_decode(),
            ]
            if not any(moved):
                return
        raise AssertionError("the pair does not settle")

    def audit(self) -> None:
        self.prefill_engine.ledger.audit()
        self.decode_engine.ledger.audit()

    def close(self) -> None:
        self._prefill_agent.close()
        self._decode_agent.close()


def _carry_out(commands: deque[Command], sender: Sender, receiver: Receiver) -> bool:
    if not commands:
        return False
    command = commands.popleft()
    match command:
        case ConnectPeer():
            sender.connect(command)
        case OpenHandoff():
            sender.open(command)
        case Push():
            sender.push(command)
        case CommitHandoff():
            sender.commit(command)
        case Close():
            sender.close(command)
        case RemovePeer(worker):
            sender.remove_peer(worker)
        case Quiesce(worker):
            receiver.quiesce(worker)
        case _:
            raise AssertionError(command)
    return True
