"""The command coppice plan: what a run will take, before anything is started."""
