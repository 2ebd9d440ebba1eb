"""Cuts URLs down to what anyone may read: without a login, a query and a fragment, where passwords and tokens are."""

from __future__ import annotations

import re

LOGIN = re.compile(r"""(?<=://)(?:[^\s/?#"'<>]*|[^\s/?#"'<>:]*:(?!\d+[/\s])[^\s"'<>]*)@""")
"""Also with a slash in the password, which should have been written %2F; a port is no password."""
QUERY = re.compile(r"""(://[^\s?#"'<>]*)[?#][^\s"'<>]*""")


def shown(text: str) -> str:
    """A text with every URL in it cut down."""
    return QUERY.sub(r"\1", LOGIN.sub("", text)) if "://" in text else text
