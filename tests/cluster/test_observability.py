"""What a cluster says of a request: the same internal id in every process's log, and counts that a scrape finds."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

from loopline.client import Accepted
from tests.support.cluster import Cluster, wait_until


def lines_of(cluster: Cluster, process: str) -> Iterator[dict[str, Any]]:
    for line in (cluster.run_dir / f"{process}.log").read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):  # libraries that are not Python write lines of their own
            yield json.loads(line)


def scrape(cluster: Cluster) -> dict[str, float]:
    """Value by name and labels, as the scrape shows them."""
    said = next(line["message"] for line in lines_of(cluster, "coordinator") if "metrics are at" in line["message"])
    url = re.search(r"http://\S+/metrics", said)
    assert url is not None
    with urllib.request.urlopen(url.group(), timeout=10) as answer:
        rows = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_one_id_leads_through_every_process(ouro: Cluster) -> None:
    events = list(ouro.client.generate("def", max_tokens=4, ignore_eos=True, label="mine"))
    (accepted,) = [event for event in events if isinstance(event, Accepted)]

    def messages(process: str) -> list[str]:
        return [line["message"] for line in lines_of(ouro, process) if line.get("request_id") == accepted.request_id]

    assert any("label 'mine'" in message for message in messages("coordinator"))
    assert any("prefilled 3 tokens" in message for message in messages("prefill-0"))
    assert any("decoding from position 3" in message for message in messages("decode-0"))
    end = "finished after 4 tokens; prefilled by prefill-0, decoded by decode-0"
    wait_until(lambda: end in messages("coordinator"), "the coordinator says how it ended")


def test_each_ending_is_a_count_of_its_own(ouro: Cluster) -> None:
    before = scrape(ouro)
    stream = ouro.client.generate("abc", max_tokens=200, ignore_eos=True)
    next(stream)
    stream.close()
    ouro.wait_idle()
    after = scrape(ouro)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    late = 'loopline_ignored_messages_total{cause="unknown"}'  # what a worker said before it heard of the cancel
    changed.pop(late, None)
    assert changed == {'loopline_requests_total{ending="cancelled"}': 1.0}
