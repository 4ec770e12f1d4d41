"""Workers, clients and one or two coordinators at once: workers are lost (suspected or proven), lapse, rejoin and
change sides; coordinators die and others start under later epochs; messages come late, twice, out of order and to the
wrong side; clients cancel, break off and go on elsewhere.

What must hold: every client sees each token once and in order, whoever computed it under whichever coordinator; every
request ends exactly once or waits; a coordinator counts nothing as given to a worker that is not its own; and in the
end, when every request is over, nothing is held anywhere. `test_tracker` has the tracker's own, closer look.
"""

import asyncio
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loopline.identity import Cause, Role, WorkerId
from tests.property.coordinators import Client, Coordinator, Process, Sent, VirtualLoop
from tests.property.test_tracker import CAUSES, ScriptedWorker
from tests.unit.coordinator.builders import VirtualClock

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
DEADLINE_S = 40.0
BEAT_S = 0.25
END_S = 65.0  # after which also a deserted coordinator's warm-up request has met its deadline
NAMES = (("prefill-0", Role.PREFILL), ("prefill-1", Role.PREFILL), ("decode-0", Role.DECODE), ("decode-1", Role.DECODE))


class MembershipMachine(RuleBasedStateMachine):
    """All that happens at one moment is one call into the virtual loop."""

    @initialize()
    def start(self) -> None:
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.num_coordinators = 0
        self.coordinators: list[Coordinator] = []
        self.clients: list[Client] = []
        self.history: list[Sent] = []
        self.processes = [Process(name, role, pid) for pid, (name, role) in enumerate(NAMES, start=1)]
        self.loop.do(self._start_coordinator)
        for process in self.processes:
            self.loop.do(lambda process=process: process.attach(self.coordinators[0]))
        self.loop.do(lambda: self._go_well(2))
        for max_tokens in (1, 5, 8):
            self._submit(self.coordinators[0], max_tokens, DEADLINE_S)

    def _start_coordinator(self) -> None:
        self.num_coordinators += 1
        self.coordinators.append(Coordinator(self.clock, self.num_coordinators))

    def _attached(self) -> list[Process]:
        return [process for process in self.processes if process.home is not None]

    def _engines(self) -> dict[WorkerId, ScriptedWorker]:
        return {process.worker: process.engine for process in self.processes if process.engine is not None}

    # ---- clients ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.coordinators)
    @rule(data=st.data(), max_tokens=st.integers(1, 8), deadline_s=st.sampled_from([DEADLINE_S, DEADLINE_S, 2.0]))
    def submit(self, data: st.DataObject, max_tokens: int, deadline_s: float) -> None:
        self._submit(data.draw(st.sampled_from(self.coordinators)), max_tokens, deadline_s)

    def _submit(self, home: Coordinator, max_tokens: int, deadline_s: float) -> None:
        client = Client(len(self.clients) + 1, max_tokens, self.clock.s + deadline_s)
        self.clients.append(client)
        self.loop.do(lambda: client.ask(home, self.clock.s))

    @precondition(lambda self: any(client.home for client in self.clients))
    @rule(data=st.data())
    def a_client_cancels(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client in self.clients if client.home]))
        assert client.home is not None
        dispatcher = client.home.dispatcher
        self.loop.do(lambda: dispatcher.cancel(client.request_id))

    @precondition(lambda self: self.coordinators and any(not client.ends for client in self.clients))
    @rule(data=st.data(), is_noticed=st.booleans())
    def a_client_goes_on_elsewhere(self, data: st.DataObject, is_noticed: bool) -> None:
        """Its connection breaks. A coordinator that does not notice runs the old request to its end, for nobody."""
        client = data.draw(st.sampled_from([client for client in self.clients if not client.ends]))
        home = data.draw(st.sampled_from(self.coordinators))

        def call() -> None:
            client.leave(is_noticed=is_noticed)
            self._ask(client, home)

        self.loop.do(call)

    def _ask(self, client: Client, home: Coordinator) -> None:
        if len(client.tokens) < client.max_tokens:
            client.ask(home, self.clock.s)

    # ---- coordinators -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.coordinators) < 2)
    @rule()
    def a_coordinator_starts(self) -> None:
        self.loop.do(self._start_coordinator)

    @precondition(lambda self: self.coordinators)
    @rule(data=st.data())
    def a_coordinator_dies(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.coordinators))

        def call() -> None:
            victim.kill()
            self.coordinators.remove(victim)
            for process in self.processes:
                if process.home is victim:
                    process.detach(is_noticed=False)
            for client in self.clients:
                if client.home is victim:
                    client.leave(is_noticed=False)

        self.loop.do(call)

    # ---- workers ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.coordinators)
    @rule(data=st.data(), is_noticed=st.booleans())
    def a_worker_changes_sides(self, data: st.DataObject, is_noticed: bool) -> None:
        """Or comes back to its own, before or after that one has noticed."""
        process = data.draw(st.sampled_from(self.processes))
        home = data.draw(st.sampled_from(self.coordinators))

        def call() -> None:
            process.detach(is_noticed=is_noticed)
            process.attach(home)

        self.loop.do(call)

    @rule(data=st.data(), is_hung=st.booleans())
    def a_worker_hangs_or_wakes(self, data: st.DataObject, is_hung: bool) -> None:
        data.draw(st.sampled_from(self.processes)).is_hung = is_hung

    @rule(data=st.data(), is_noticed=st.booleans(), is_reported_late=st.booleans())
    def a_worker_dies(self, data: st.DataObject, is_noticed: bool, is_reported_late: bool) -> None:
        """Its launcher tells every coordinator, and then starts another process under its name."""
        process = data.draw(st.sampled_from(self.processes))

        def call() -> None:
            process.detach(is_noticed=is_noticed)
            told = self.coordinators[:1] if is_reported_late else self.coordinators
            for coordinator in told:
                coordinator.dispatcher.on_ended([process.uuid])
            process.pid += len(NAMES)
            process.life = 0
            process.is_hung = False

        self.loop.do(call)

    @precondition(lambda self: self._attached())
    @rule(data=st.data(), refusal=st.none() | st.none() | CAUSES, most=st.integers(1, 4))
    def a_worker_reads(self, data: st.DataObject, refusal: Cause | None, most: int) -> None:
        process = data.draw(st.sampled_from(self._attached()))
        self.loop.do(lambda: process.read(refusal, most))

    @precondition(lambda self: self._attached())
    @rule(data=st.data())
    def a_worker_steps(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self._attached()))
        self.loop.do(lambda: process.step(self._engines()))

    # ---- the network and time ---------------------------------------------------------------------------------------

    @precondition(lambda self: any(process.on_the_way for process in self.processes))
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "twice", "overtakes", "lost"]))
    def a_message(self, data: st.DataObject, fate: str) -> None:
        process = data.draw(st.sampled_from([process for process in self.processes if process.on_the_way]))
        sent = process.on_the_way.pop(-1 if fate == "overtakes" else 0)
        self.history.append(sent)
        for _ in range({"twice": 2, "lost": 0}.get(fate, 1)):
            self.loop.do(lambda: self._deliver(sent, sent.epoch))

    @precondition(lambda self: self.history and self.coordinators)
    @rule(data=st.data(), as_whom=st.sampled_from(["itself", "its next life"]))
    def old_messages_come_again(self, data: st.DataObject, as_whom: str) -> None:
        """At the coordinator that they were for and at the other one, also on the stream of the worker's next life."""
        home = data.draw(st.sampled_from(self.coordinators))
        lives = {process.uuid: process.worker for process in self.processes}

        repeated = self.history[-data.draw(st.integers(1, 20)) :]

        def call() -> None:
            for sent in repeated:
                worker = lives.get(sent.worker.uuid, sent.worker) if as_whom == "its next life" else sent.worker
                if worker == sent.worker or sent.epoch != home.epoch:  # a stream carries what its own life says
                    home.dispatcher.on_message(worker, sent.message, sent.epoch)

        self.loop.do(call)

    def _deliver(self, sent: Sent, epoch: int) -> None:
        for coordinator in self.coordinators:
            if coordinator.epoch == epoch:
                coordinator.dispatcher.on_message(sent.worker, sent.message, sent.epoch)

    @rule(beats=st.integers(1, 8))
    def time_passes(self, beats: int) -> None:
        for _ in range(beats):
            self._pass_time()

    def _pass_time(self) -> None:
        """A quarter of a second: every worker that is well says so, and is heard after all that it said before."""
        self.clock.s += BEAT_S

        def call() -> None:
            for process in self.processes:
                process.beat()
                if not process.is_hung:
                    self._flush(process)

        self.loop.do(call)

    def _flush(self, process: Process) -> None:
        while process.on_the_way:
            sent = process.on_the_way.pop(0)
            self.history.append(sent)
            self._deliver(sent, sent.epoch)

    @rule(rounds=st.integers(1, 6))
    def all_goes_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self.loop.do(lambda: self._go_well(1))

    def _go_well(self, rounds: int) -> None:
        for _ in range(rounds):
            for process in self._attached():
                if not process.is_hung:
                    process.read()
                if process.engine is not None and not process.is_hung:
                    process.step(self._engines())
                    self._flush(process)
            for client in self.clients:
                client.read()

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_request_ends_once_or_is_somewhere(self) -> None:
        self.loop.do(lambda: [client.read() for client in self.clients])
        for client in self.clients:
            assert len(client.ends) <= 1
            assert not (client.ends and client.home)

    @invariant()
    def what_is_given_is_given_to_ones_own(self) -> None:
        for coordinator in self.coordinators:
            for view in coordinator.dispatcher.snapshot().workers:
                assert not view.assigned or view.state != "lost"
            running = coordinator.dispatcher.num_running + coordinator.dispatcher.num_queued
            assert running >= sum(client.home is coordinator for client in self.clients)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.do(lambda: None)
            self.loop.close()

    def _end(self) -> None:
        """Everybody wakes and comes to the youngest coordinator; then all answers end, by themselves or by deadline."""
        if not self.coordinators:
            self.loop.do(self._start_coordinator)
        home = self.coordinators[-1]
        for process in self.processes:
            process.is_hung = False
        for _ in range(int(END_S / BEAT_S)):
            self._pass_time()

            def call() -> None:
                for process in self.processes:
                    if process.home is None:
                        process.attach(home)
                for client in self.clients:
                    if client.needs_a_coordinator:
                        self._ask(client, home)
                self._go_well(1)

            self.loop.do(call)
        for client in self.clients:
            is_whole = len(client.tokens) == client.max_tokens
            assert client.ends or is_whole, "neither ended nor whole"
        for coordinator in self.coordinators:
            dispatcher = coordinator.dispatcher
            assert (dispatcher.num_queued, coordinator.num_assigned) == (0, 0)
            assert dispatcher.num_running == 0
        assert all(not process.engine.holds for process in self.processes if process.engine is not None)


MembershipMachine.TestCase.settings = settings(
    max_examples=1000 if SOAK else 40, stateful_step_count=80 if SOAK else 40, deadline=None
)
TestMembership = MembershipMachine.TestCase
