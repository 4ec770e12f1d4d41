"""Moving KV blocks between workers: the protocol tables, the transport seam with its two implementations, and the one
thread of a worker that owns a transport. No engine, no gRPC and no torch here; addresses come in as integers. Called by
`prefill_worker` and `decode_worker`."""
