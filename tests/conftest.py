"""How property tests run: without time limits on examples, and with many more of them in `make soak`. Where tests and
the processes that they start keep what is cached between starts: in a folder that ends with the run. And that kernels
run in Triton's interpreter where there is no CUDA device."""

import atexit
import os
import shutil
import tempfile

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is first imported

settings.register_profile("check", deadline=None, print_blob=True)
settings.register_profile("soak", parent=settings.get_profile("check"), max_examples=2_000)
settings.load_profile("soak" if os.environ.get("LOOPLINE_SOAK") == "1" else "check")

if "LOOPLINE_CACHE" not in os.environ:
    os.environ["LOOPLINE_CACHE"] = tempfile.mkdtemp(prefix="loopline-cache-")
    atexit.register(shutil.rmtree, os.environ["LOOPLINE_CACHE"], ignore_errors=True)
