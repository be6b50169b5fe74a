"""NVProcessBench: records of judged search trajectories, how they are built, and how judges are
measured on them (methods.md 2.5)."""
