"""Every error that crosses a module border, and who must act on it.

    LooplineError
     |- RequestError (also ValueError) ........ the client: this request cannot run as it was sent
     |   |- InvalidRequest                      a value is out of range, or a field is missing
     |   |- RequestTooLarge                     it can never fit: context, or what an arena can hold
     |   `- NoTokenizer                         text was sent, or asked for, and the checkpoint has no tokenizer
     |- RequestRefused .......................... the client may try again later
     |   |- Overloaded                          the queue is full
     |   |- DeadlineExceeded                    the request's deadline passed first
     |   |- NotRead                             the client left too much of its answer unread
     |   `- WorkerLost                          a worker that ran it was lost; says what was delivered
     |- OperatorError (also ValueError) ......... the operator: configuration, files, ports
     |   |- ConfigError                         a key of the cluster YAML; names file, key and what is allowed
     |   |- CheckpointError                     a checkpoint folder; names the file or tensor
     |   |   `- UnsupportedArchitecture         config.json names a model that is not served
     |   |- AccessRefused                       a call lacks the token that it needs
     |   |- AddressInUse                        a port is taken; names it
     |   `- CoordinatorUnreachable              a worker cannot reach the coordinator at ADDRESS
     |- PeerError ............................... the other process, or the network between
     |   |- FingerprintMismatch                 two workers must not be paired; names the field that differs
     |   |- TransferError                       a push could not be posted, or ended in an error
     |   `- PeerLost                            the process at the other end is gone
     `- InvariantBroken (also AssertionError) ... us: a bug; nothing was changed by the call that raised it
         |- IllegalTransition                   a protocol table was asked for a move that it does not have
         |- WrittenContractBroken               KV would have been read that nobody wrote
         `- AuditFailed                         the books do not add up

"No room" is not an error: it is a return value. This module imports nothing.
"""


class LooplineError(Exception):
    """Root of the tree above."""


class RequestError(LooplineError, ValueError):
    """The client must change the request; the text names the value that was wrong."""


class InvalidRequest(RequestError):
    """A value is out of its range or a needed field is missing."""


class RequestTooLarge(RequestError):
    """The request can never fit, whatever else finishes; the text has both numbers."""


class NoTokenizer(RequestError):
    """Text in a request to a checkpoint folder that has no tokenizer.json."""


class RequestRefused(LooplineError):
    """The request was right and may succeed later or elsewhere."""


class Overloaded(RequestRefused):
    """The queue is full. `retry_after_s`: when a place is likely to be free, by how fast the queue empties; None: who
    refused it did not say."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestRefused):
    """The request's deadline passed before it ended."""


class NotRead(RequestRefused):
    """The client left more of its answer unread than the coordinator keeps, or took nothing for too long."""


class WorkerLost(RequestRefused):
    """A worker that ran the request was lost, and it could not go on elsewhere."""


class OperatorError(LooplineError, ValueError):
    """The operator must change a file, a flag or the machine."""


class ConfigError(OperatorError):
    """A cluster YAML is wrong; the text names the file, the key and the allowed values."""


class CheckpointError(OperatorError):
    """A checkpoint folder is wrong; the text names the file or the tensor."""


class UnsupportedArchitecture(CheckpointError):
    """config.json names an architecture that is not served."""


class AccessRefused(OperatorError):
    """The caller must be given another token; the text says what was missing, not what was expected."""


class AddressInUse(OperatorError):
    """A port that a server was told to listen on is taken."""


class CoordinatorUnreachable(OperatorError):
    """A worker could not reach the coordinator at the address that it was given."""


class PeerError(LooplineError):
    """Another process of the cluster, or the network to it, failed."""


class FingerprintMismatch(PeerError):
    """Two workers do not belong to one pairing group; the text names the first field that differs."""


class TransferError(PeerError):
    """A push was refused by the transport or ended in an error."""


class PeerLost(PeerError):
    """The process at the other end is gone."""


class InvariantBroken(LooplineError, AssertionError):
    """A bug of ours. The call that raised it changed nothing."""


class IllegalTransition(InvariantBroken):
    """A protocol table has no such move from the state that it is in."""


class WrittenContractBroken(InvariantBroken):
    """A step would read keys and values that were never written at that depth."""


class AuditFailed(InvariantBroken):
    """free + held + cached + quarantined differs from total, or a count differs from what it counts."""
