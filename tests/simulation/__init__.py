"""Deterministic simulation of a run: the real scheduler, its real journal and wire messages, under
a simulated clock and network.

One seed decides everything: the run's settings, delays, faults and crashes. ``python -m
tests.simulation SEED`` replays one seed and prints its history; docs/reliability.md ("Simulation")
says what is simulated and which invariants are checked.
"""
