"""The decode worker: reserves blocks, receives prompts' KV from prefill workers, and generates the rest of the
answer.
"""
