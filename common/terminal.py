"""Text of others as it may be shown on a terminal and in a log."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Return ``text`` with its control characters, except tab and line feed, written as escapes
    (``\\u001b``), so that none of them moves the cursor, changes colours or types a reply."""
    return _CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", text)
