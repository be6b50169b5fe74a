"""A real sglang server on the CPU, in an environment of its own: what tests of the sglang engine
talk to."""
