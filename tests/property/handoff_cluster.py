"""A decode worker and its writers for `test_handoff_tables`: both tables, a network that reorders, repeats and loses
messages, and writers that fail and die.

The model knows what the tables cannot: which posted bytes may still land, and for whom each block is held. Bytes that
land in a block of anybody else are the failure to look for.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvtransfer.handoff import (
    Activate,
    AskClose,
    Closed,
    Drained,
    FreeBlocks,
    FreeQuarantined,
    Granted,
    Opened,
    PollToQuiescence,
    Quarantine,
    ReceiveEffect,
    ReceiveState,
    SendEffect,
    SendState,
    StartLocal,
)
from kvtransfer.receive_table import ReceiveTable
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import Commit, PushNotice, PushRange, TokenRow
from tests.property.handoff_records import Answer, Ask, Bind, Cancel, Message, Notice, Start, Task, Write, Writer

NUM_BLOCKS = 12
REQUESTS = ("red", "blue", "green")


class Cluster:
    """One decode worker with a table, several writers, and a bag of messages that may be delivered in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.table = ReceiveTable()
        self.free = list(range(NUM_BLOCKS))
        self.held_for: dict[int, HandoffKey] = {}  # blocks a remote writer may write
        self.used: dict[HandoffKey, tuple[int, ...]] = {}  # activated or local: nobody else may write
        self.content: dict[int, tuple[HandoffKey, int]] = {}
        self.bag: list[Message] = []
        self.writes: list[Write] = []
        self.writers: list[Writer] = []
        self.quiet_asked: list[WorkerId] = []
        self.generations = dict.fromkeys(REQUESTS, 0)
        self.seen: Counter[type] = Counter()
        self.new_writer()
        self.new_writer()

    def new_writer(self) -> None:
        worker = WorkerId(f"writer{len(self.writers)}", 1)
        self.writers.append(Writer(Peer(worker, worker.uuid, "host:1")))

    # ---- carrying out effects --------------------------------------------------------------------------------------

    def receive(self, effects: tuple[ReceiveEffect, ...]) -> None:
        for effect in effects:
            self.seen[type(effect)] += 1
            match effect:
                case FreeBlocks(key, block_ids) | FreeQuarantined(key, block_ids):
                    self.let_go(key, block_ids)
                    self.free += block_ids
                case Activate(key, commit, block_ids):
                    start = min(part.first_block for part in commit.pushes)
                    wanted = [(key, start + i) for i in range(len(block_ids))]
                    assert [self.content.get(block) for block in block_ids] == wanted, "an incomplete set was activated"
                    self.let_go(key, block_ids)
                    self.used[key] = block_ids
                case StartLocal(key, block_ids):
                    self.let_go(key, block_ids)
                    self.used[key] = block_ids
                case Quarantine(key, block_ids, _):
                    assert all(self.held_for[block] == key for block in block_ids)
                case AskClose():
                    self.bag.append(Ask(effect))
                case PollToQuiescence(worker):
                    self.quiet_asked.append(worker)
                case Granted():
                    self.bag.append(Start(effect))
                case _:
                    pass

    def let_go(self, key: HandoffKey, block_ids: tuple[int, ...]) -> None:
        for block in block_ids:
            assert self.held_for.pop(block) == key

    def send_effects(self, writer: Writer, effects: tuple[SendEffect, ...]) -> None:
        for effect in effects:
            self.seen[type(effect)] += 1
            if isinstance(effect, Closed):
                self.bag.append(Answer(effect.key, writer.peer.worker, effect.state))
            if isinstance(effect, Closed | Drained):
                mine = [write for write in self.writes if write.writer is writer and write.key == effect.key]
                assert all(write.terminal for write in mine), "the sources were freed under a handle"

    # ---- the network -----------------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        match message:
            case Bind(key, writer):
                self.receive((self.table.bind(key, writer),))
            case Cancel(key):
                self.receive(self.table.cancel(key, Cause.CANCELLED))
            case Notice(agent_name, notice):
                self.receive(self.table.push_arrived(agent_name, notice))
            case Commit():
                self.receive((self.table.committed(message),))
            case Answer(key, worker, state):
                self.receive(self.table.writer_closed(key, worker, state))
            case Start(granted):
                self.start(self.process(granted.writer), granted)
            case Ask(ask):
                writer = self.process(ask.writer)
                if writer.alive:
                    self.send_effects(writer, writer.table.close(ask.key))

    def process(self, peer: Peer) -> Writer:
        return next(writer for writer in self.writers if writer.peer == peer)

    def start(self, writer: Writer, granted: Granted) -> None:
        if writer.alive:
            effects = writer.table.open(granted.key, WorkerId("decode", 1))
            self.send_effects(writer, effects)
            if Opened(granted.key) in effects:
                writer.tasks[granted.key] = Task(granted.first_block, granted.block_ids)

    def land_one(self, write: Write) -> None:
        block, position = write.left.pop(self.rng.randrange(len(write.left)))
        assert self.held_for.get(block) == write.key, f"{write.key} wrote block {block} of {self.held_for.get(block)}"
        self.content[block] = (write.key, position)

    def land_all(self, write: Write) -> None:
        while write.left:
            self.land_one(write)

    # ---- what may happen: the coordinator and the decode worker ----------------------------------------------------

    def key(self, *offsets: int) -> HandoffKey:
        """A request's newest generation, plus one of `offsets`."""
        request = self.rng.choice(REQUESTS)
        return HandoffKey(request, max(0, self.generations[request] + self.rng.choice(offsets)))

    def newest(self, request_id: str) -> HandoffKey:
        return HandoffKey(request_id, self.generations[request_id])

    def reserve(self) -> None:
        key, count = self.key(0, 1, 1, 1, -1), self.rng.randint(1, 4)
        cause = self.table.refusal(key)
        supersedes = self.table.state(self.newest(key.request_id)) not in (None, ReceiveState.QUARANTINED)
        if len(self.free) < count or (supersedes and self.rng.random() < 0.95):
            return
        block_ids = tuple(self.free[:count])
        effects = self.table.reserve(key, self.rng.randint(0, 2), block_ids)
        assert cause is not None or self.table.state(key) is ReceiveState.RESERVED
        if cause is None:
            self.generations[key.request_id] = max(key.generation, self.generations[key.request_id])
            del self.free[:count]
            self.held_for.update(dict.fromkeys(block_ids, key))
        self.receive(effects)

    def send_bind(self) -> None:
        self.bag.append(Bind(self.key(0, 0, 0, 0, -1), self.rng.choice(self.writers[-2:]).peer))

    def send_cancel(self) -> None:
        self.bag.append(Cancel(self.key(0, 0, 0, -1, 1)))

    def start_local(self) -> None:
        self.receive((self.table.start_local(self.key(0)),))

    def finish_request(self) -> None:
        if self.used:
            self.free += self.used.pop(self.rng.choice(list(self.used)))

    def suspect(self) -> None:
        self.receive(self.table.worker_gone(self.rng.choice(self.writers).peer.worker, proven=False))

    def kill(self) -> None:
        if len(self.writers) < 6:
            self.writers[-self.rng.randint(1, 2)].alive = False
            self.new_writer()

    def prove(self) -> None:
        writer = self.rng.choice(self.writers)
        if not writer.alive:
            self.receive(self.table.worker_gone(writer.peer.worker, proven=True))

    def quiesce(self) -> None:
        if not self.quiet_asked:
            return
        worker = self.quiet_asked.pop(self.rng.randrange(len(self.quiet_asked)))
        for write in [write for write in self.writes if write.writer.peer.worker == worker]:
            self.land_all(write)
            self.writes.remove(write)
        self.receive(self.table.quiesced(worker))

    def quiesced_unasked(self) -> None:
        worker = self.rng.choice(self.writers).peer.worker
        if worker not in self.quiet_asked:
            self.receive(self.table.quiesced(worker))

    # ---- what may happen: writers ----------------------------------------------------------------------------------

    def post(self) -> None:
        tasks = [
            (writer, key, task)
            for writer in self.writers
            if writer.alive
            for key, task in writer.tasks.items()
            if writer.table.state(key) is SendState.OPEN
        ]
        if not tasks:
            return
        writer, key, task = self.rng.choice(tasks)
        done = sum(part.num_blocks for part in task.posted)
        size = min(self.rng.randint(1, 3), len(task.block_ids) - done)
        part = PushRange(len(task.posted), task.first_block + done, size)
        assert writer.table.may_post(key, part.seq)
        writer.table.posted(key, part)
        task.posted.append(part)
        left = [(task.block_ids[done + i], part.first_block + i) for i in range(size)]
        self.writes.append(Write(writer, key, part, left))
        if done + size == len(task.block_ids):
            row = TokenRow(key.request_id, 0, 1, 5, 4)
            self.bag.append(Commit(key, writer.peer.worker, 0, row, tuple(task.posted)))
            self.send_effects(writer, writer.table.commit(key))

    def land(self) -> None:
        writes = [write for write in self.writes if write.left]
        if writes:
            write = self.rng.choice(writes)
            self.land_one(write)
            if not write.left and not write.terminal:
                self.bag.append(Notice(write.writer.peer.worker.agent_name, PushNotice(write.key, write.part)))

    def live_handles(self) -> list[Write]:
        return [write for write in self.writes if not write.terminal and write.writer.alive]

    def handle_done(self) -> None:
        landed = [write for write in self.live_handles() if not write.left]
        if landed:
            self.end_handle(self.rng.choice(landed), failed=False)

    def handle_failed(self) -> None:
        handles = self.live_handles()
        if handles:
            self.end_handle(self.rng.choice(handles), failed=True)

    def end_handle(self, write: Write, failed: bool) -> None:
        write.terminal = True
        table, seq = write.writer.table, write.part.seq
        if failed:
            write.writer.failed.add(write.key)
        self.send_effects(write.writer, (table.push_failed if failed else table.push_done)(write.key, seq))
        before = (table.counts(), table.state(write.key), table.pushes(write.key))
        with pytest.raises(IllegalTransition):
            table.push_done(write.key, seq)
        with pytest.raises(IllegalTransition):
            table.posted(write.key, write.part)
        assert (table.counts(), table.state(write.key), table.pushes(write.key)) == before

    # ---- what may happen: the network ------------------------------------------------------------------------------

    def handle_message(self) -> None:
        if not self.bag:
            return
        message = self.rng.choice(self.bag)
        fate = self.rng.random()
        if fate > 0.1:
            self.bag.remove(message)
        if fate < 0.97:
            self.deliver(message)

    def deliver_wrong(self) -> None:
        """A message that nobody who keeps the rules would send: never raises, never changes what is held."""
        if not self.bag:
            return
        message, before = self.rng.choice(self.bag), (self.table.holders(), self.table.counts())
        match message:
            case Notice(agent_name, notice):
                part = replace(notice.range, first_block=notice.range.first_block + 100)
                self.receive(self.table.push_arrived("loopline-nobody", notice))
                self.receive(self.table.push_arrived(agent_name, replace(notice, range=part)))
            case Commit():
                self.receive((self.table.committed(replace(message, pushes=message.pushes[1:])),))
                self.receive((self.table.committed(replace(message, writer=WorkerId("nobody", 1))),))
            case Bind(key, _) if self.table.state(key) not in (None, ReceiveState.RESERVED):
                self.receive((self.table.bind(key, Peer(WorkerId("nobody", 1), "nobody", "host:1")),))
        assert (self.table.holders(), self.table.counts()) == before

    def step(self) -> None:
        """One random thing."""
        self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0](self)
        assert self.table.holders() == self.held_for
        assert len(self.free) + len(self.held_for) + sum(map(len, self.used.values())) == NUM_BLOCKS

    # ---- the end ---------------------------------------------------------------------------------------------------

    def end_fairly(self) -> None:
        """Fair from here on: everything is delivered, everything ends, the dead and those that said FAILED are proven
        gone. Then nothing is held, and a writer that is well has nothing open."""
        for request, generation in self.generations.items():
            key = HandoffKey(request, generation)
            self.deliver(Cancel(key))
            for writer in self.writers:
                self.send_effects(writer, writer.table.close(key))
        for write in self.live_handles():
            self.land_all(write)
            self.end_handle(write, failed=False)
        for ask in self.table.asks():
            self.bag.append(Ask(ask))
        while self.bag:
            self.deliver(self.bag.pop(0))
        for writer in self.writers:
            if not writer.alive or writer.failed:
                writer.alive = False
                self.receive(self.table.worker_gone(writer.peer.worker, proven=True))
        while self.quiet_asked:
            self.quiesce()
        assert self.table.counts() == ()
        assert self.table.holders() == self.held_for == {}
        assert self.table.asks() == ()
        assert all(writer.table.counts() == () for writer in self.writers if writer.alive)


WEIGHTS = {
    Cluster.handle_message: 12,
    Cluster.land: 10,
    Cluster.post: 8,
    Cluster.handle_done: 5,
    Cluster.reserve: 6,
    Cluster.send_bind: 3,
    Cluster.finish_request: 2,
    Cluster.send_cancel: 0.7,
    Cluster.deliver_wrong: 1,
    Cluster.quiesce: 1,
    Cluster.quiesced_unasked: 0.3,
    Cluster.prove: 1,
    Cluster.start_local: 0.3,
    Cluster.suspect: 0.3,
    Cluster.kill: 0.3,
    Cluster.handle_failed: 0.3,
}
