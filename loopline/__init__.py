"""Loopline: serving for looped language models, prefill and decode apart. Importing this imports nothing heavy."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 2
