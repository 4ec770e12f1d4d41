"""How property tests run: without time limits on examples, and with many more of them in `make soak`."""

import os

from hypothesis import settings

settings.register_profile("check", deadline=None, print_blob=True)
settings.register_profile("soak", parent=settings.get_profile("check"), max_examples=2_000)
settings.load_profile("soak" if os.environ.get("LOOPLINE_SOAK") == "1" else "check")
