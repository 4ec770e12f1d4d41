"""No script of messages, failures and deaths gives a block two writers, activates an incomplete set, or leaves a block
held for ever. The model is in `handoff_cluster`. `LOOPLINE_SOAK=1` runs many more and longer scripts."""

import os
import random
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.handoff import Activate, ReceiveEffect, SendEffect
from tests.property.handoff_cluster import Cluster

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
NUM_SCRIPTS = 20_000 if SOAK else 300
MAX_STEPS = 800 if SOAK else 400


@pytest.mark.timeout(1800 if SOAK else 120)
@settings(max_examples=NUM_SCRIPTS, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_steps=st.integers(50, MAX_STEPS))
def test_no_script_gives_a_block_two_writers_or_leaves_one_held(seed: int, num_steps: int) -> None:
    cluster = Cluster(random.Random(seed))
    for _ in range(num_steps):
        cluster.step()
    cluster.end_fairly()


def test_the_scripts_reach_what_they_are_for() -> None:
    """Activations are common, and every kind of effect occurs: else the test above would be looking elsewhere."""
    seen: Counter[type] = Counter()
    for seed in range(100):
        cluster = Cluster(random.Random(seed))
        for _ in range(300):
            cluster.step()
        seen += cluster.seen
    assert seen[Activate] > 150
    assert min(seen[kind] for kind in get_args(ReceiveEffect) + get_args(SendEffect)) > 5, seen
