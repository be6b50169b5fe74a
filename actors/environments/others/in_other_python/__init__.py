"""Files that also run in other Pythons, without any package of this project."""
