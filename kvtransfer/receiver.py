"""The receiving half of the transfer thread: makes the agent's progress, turns notices into events, and polls a dead
peer's last bytes in. Which push counts is not decided here but in the engine's `ReceiveTable`."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.agent import TransferAgent
from kvtransfer.commands import Event, PushArrived, Quiesced
from kvtransfer.handoff import IgnoredCounts
from kvtransfer.links import WARM_UP_NOTICE
from loopline.clock import Clock
from loopline.identity import Cause, WorkerId
from loopline.messages import PushNotice

QUIET_ROUNDS = 16
QUIET_S = 0.25
"""A dead peer is quiet after both: that many rounds without its notices, over at least that time. Its kernel may still
deliver what it had taken before the process died, and only our polling lands it."""


@dataclass(slots=True)
class _Quieting:
    rounds: int
    since_s: float


class Receiver:
    """Polls one agent for what comes in. Invariant: every well-formed notice becomes exactly one PushArrived."""

    def __init__(
        self,
        agent: TransferAgent,
        decode_notice: Callable[[bytes], PushNotice],
        clock: Clock,
        emit: Callable[[Event], None],
    ) -> None:
        self._agent = agent
        self._decode_notice = decode_notice
        self._clock = clock
        self._emit = emit
        self._quieting: dict[WorkerId, _Quieting] = {}
        self._ignored = IgnoredCounts()

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """(cause, number of notices that were not notices)."""
        return self._ignored.as_pairs()

    def poll(self) -> bool:
        """One round of progress. True when a notice arrived."""
        notices = self._agent.take_notices()
        for agent_name, data in notices:
            if data == WARM_UP_NOTICE:
                continue
            try:
                notice = self._decode_notice(data)
            except ValueError:
                self._ignored.ignore(Cause.INVALID)
                continue
            self._emit(PushArrived(agent_name, notice))
        if self._quieting:
            self._note_round({agent_name for agent_name, _ in notices})
        return bool(notices)

    def quiesce(self, worker: WorkerId) -> None:
        """Drop the connection, if there is one, and start to count the rounds without news of this worker."""
        self._agent.remove_peer(worker.agent_name)
        self._quieting[worker] = _Quieting(0, self._clock.now_s())

    def _note_round(self, talkers: set[str]) -> None:
        now_s = self._clock.now_s()
        for worker, quieting in list(self._quieting.items()):
            if worker.agent_name in talkers:
                self._quieting[worker] = _Quieting(0, now_s)
                continue
            quieting.rounds += 1
            if quieting.rounds >= QUIET_ROUNDS and now_s - quieting.since_s >= QUIET_S:
                del self._quieting[worker]
                self._emit(Quiesced(worker))
