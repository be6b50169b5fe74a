"""Deterministic simulation of a run; docs/reliability.md ("Simulation") describes it."""
