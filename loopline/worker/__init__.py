"""What both kinds of worker process share: the engine thread, the stream to the coordinator, start and end of the
process.

A worker has three threads. The engine thread owns scheduler, ledger, handoff books and device; the transfer thread
(`kvtransfer`) owns the NIXL agent; asyncio owns gRPC. They exchange frozen records by queue, and the engine never waits
for the others.
"""
