"""Who is gone past for a while because something failed there: workers, and links between two (`loopline.holds`).

A fault of one link says nothing of its workers: they go on with others.
"""

from coordinator.snapshot import Avoided
from loopline.holds import Holds
from loopline.identity import WorkerId

Fault = tuple[WorkerId, ...]
"""One worker, or the two ends of a link: (prefill, decode)."""


class Avoidance(Holds[Fault]):
    """Holds on workers and links."""

    def avoided(self, now_s: float) -> Avoided:
        """Who is avoided at this moment."""
        held = list(self.at(now_s))
        return Avoided(
            workers=frozenset(fault[0] for fault in held if len(fault) == 1),
            links=frozenset((fault[0], fault[1]) for fault in held if len(fault) > 1),
        )

    def worker_gone(self, worker: WorkerId) -> None:
        """It is gone for good."""
        self.forget(lambda fault: worker in fault)
