"""Measuring what Loopline itself costs. Commands call it; nothing that serves imports it."""
