"""`loopline generate`: one answer from a running cluster."""

from loopline.cli.answer import deliver
from loopline.cli.options import Address, Deadline, Json, Priority, with_credentials, with_request_options
from loopline.client import Client
from loopline.intake import RequestOptions
from loopline.security import Credentials


@with_credentials
@with_request_options
def generate(
    *,
    address: Address,
    options: RequestOptions,
    credentials: Credentials,
    deadline: Deadline = None,
    priority: Priority = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt on a running cluster."""
    with Client(address, credentials=credentials) as client:
        events = client.stream(options, deadline_s=deadline, priority=priority)
        deliver(events, as_json=as_json, options=options)
