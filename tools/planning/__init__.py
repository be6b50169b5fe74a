"""The command tools/plan: what a run will take, before anything is started."""
