"""The prefill worker: computes prompts chunk by chunk and pushes their KV into a decode worker's reserved blocks."""
