"""Capacity planning: what a model needs, what hardware gives, and what a cluster of the two can serve. No torch.

Pure functions of a model's geometry, a hardware profile, a configuration and a workload; docs/capacity.md has every
formula. `loopline check` shows the plan.
"""
