"""Files that run in other Pythons, without any package of this project: the worker, and the games
that it knows by name (``other_python``)."""
