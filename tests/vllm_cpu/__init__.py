"""A real vLLM server on the CPU, in an environment of its own: what tests of the vllm engine talk
to."""
