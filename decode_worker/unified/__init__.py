"""The unified worker: a decode worker to which every prompt is local. Reservations, ends, drains and recovery are the
same, and nobody is ever bound to write here. What differs is the engine's slice of the configuration (the section
`unified`) and that no network transport is opened.
"""
