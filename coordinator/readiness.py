"""Whether the cluster serves, and the probe that finds it out. No I/O; the dispatcher owns one and runs the probe."""

import asyncio
import logging
import uuid

from coordinator.effects import Ending, Outcome
from loopline.request import Request, SamplingParams

_LOG = logging.getLogger(__name__)


class Readiness:
    """`serving` means: a ready pair or a unified worker exists, and since there was neither a token has come through.

    Invariant: at most one probe runs. A coordinator that was closed does not serve again.
    """

    def __init__(self, probe_params: SamplingParams, probe_token_id: int) -> None:
        """What a probe asks for: one token after another one."""
        self.serving = False
        self.changed = asyncio.Event()
        self.probe_id: str | None = None
        self._params = probe_params
        self._token_id = probe_token_id
        self._may_probe = True  # false from a probe's failure to the next heartbeat
        self._is_closed = False

    def look(self, can_serve: bool) -> Request | None:
        """Something changed. The probe that should run now, if one should."""
        if not can_serve:
            self._set(False)
        elif not self.serving and self.probe_id is None and self._may_probe and not self._is_closed:
            self.probe_id = str(uuid.uuid4())
            return Request(request_id=self.probe_id, prompt_ids=(self._token_id,), params=self._params)
        return None

    def token_came(self, can_serve: bool) -> None:
        """Whoever's it was, the cluster serves."""
        if not self._is_closed:
            self._set(can_serve)

    def probe_ended(self, outcome: Outcome) -> bool:
        """Whether a token came through it."""
        self.probe_id = None
        if outcome.ending is Ending.FINISHED:
            return True
        self._may_probe = False
        _LOG.warning("the warm-up request failed: %s", outcome.detail)
        return False

    def heartbeat(self) -> None:
        """A worker is well: a probe that failed may be tried again."""
        self._may_probe = True

    def close(self) -> None:
        """Nothing new is taken any more."""
        self._is_closed = True
        self._set(False)

    def _set(self, serving: bool) -> None:
        if serving is not self.serving:
            self.serving = serving
            self.changed.set()
