"""NVProcessBench: records of judged search trajectories, their builder, and the measurement of judges on them (methods.md 2.5)."""
