"""Agents to copy (docs/agents.md)."""
