"""A process that leaves at SIGTERM only if it was not told to be stubborn, and at the end of its life pipe always."""

import argparse
import os
import signal
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--config", default="")
for ignored in ("--coordinator", "--host", "--name", "--uuid"):
    parser.add_argument(ignored)
parser.add_argument("--life-fd", type=int, required=True)
options = parser.parse_args()
if options.fail:
    sys.exit("the machine has no such thing")
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.config:
    sys.stdout.write(f"{options.config}\n")
sys.stdout.write("started\n")
sys.stdout.flush()
os.read(options.life_fd, 1)
