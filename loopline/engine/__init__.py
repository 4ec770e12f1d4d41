"""The in-process engine: a model, an arena and a scheduler, stepped by one thread. Both kinds of worker run it, and
`loopline run` too. Needs torch, safetensors and numpy; knows nothing of gRPC, NIXL or Ray."""
