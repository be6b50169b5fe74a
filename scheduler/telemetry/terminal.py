"""Lines on the terminal beside the live table.

A line of stdout that is a fault or a warning begins with WARNING, and one of the run's end with
NOTICE (the levels of sd-daemon). Other lines have no such beginning, and a record is a line of
JSON. The launcher (tools/launching/screen.py) takes the beginnings away, and chooses what it shows.
"""

WARNING, NOTICE = "<4>", "<5>"


def say(line: str) -> None:
    """Print a line about a fault, or a warning, at once."""
    print(WARNING + line, flush=True)


def conclude(text: str) -> None:
    """Print lines of the run's end at once."""
    print("\n".join(NOTICE + line for line in text.split("\n")), flush=True)
