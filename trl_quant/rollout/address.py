"""Addresses of servers, as messages and records show them."""

import re


def without_password(text: str) -> str:
    """Returns an address, or a text with addresses in it, with `***` in place of a user's name and password."""
    return re.sub(r"(?<=//)[^/\s'\"]*@", "***@", text)
