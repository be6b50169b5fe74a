"""Asynchronous reinforcement learning of language-model agents on prefix trees."""
