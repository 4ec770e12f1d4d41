"""Deciding what each step computes. No torch, no I/O: plan -> (somebody runs it) -> commit."""
