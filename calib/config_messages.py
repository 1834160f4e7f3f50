"""Turns the error messages of jsonargparse into one readable line."""

import difflib
import re
from collections.abc import Sequence

from calib.runtime.messages.printable import LENGTH, printable, shortened

LINE = 600  # most characters of a parser's message
# In a message about all types that an option accepts: the name of a class that could not be built, and the reason.
CLASS = re.compile(r"Problem with given class_path '(?:[\w.]*\.)?(\w+)':\s*(.+?)\n\s*(?:- |Given )", re.DOTALL)


def unknown(key: str, keys: Sequence[str]) -> str:
    """Returns the message for an unknown key, with the most similar known key, or the keys of its group."""
    key = shortened(key, LENGTH)
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
    if close:
        return f"unknown key '{key}' (did you mean '{close[0]}'?)"
    group = key.split(".")[0]
    beside = [known for known in keys if known.startswith(f"{group}.")] if "." in key else []
    names = beside or [known for known in keys if "." not in known]
    return f"unknown key '{key}' (known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}; --help tells all)"


def explain(message: str, keys: Sequence[str]) -> str:
    """Returns one readable line for a message of jsonargparse, which may have several lines and name its classes."""
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        word = found[1].partition("=")[0]
        return unknown(word.lstrip("-"), keys) if word.startswith("-") else f"unexpected argument '{word}'"
    if found := re.match(r"the following arguments are required: (.+)", message):
        return f"'{found[1]}' must be given"
    if found := re.match(r"Call to compute_fn of link .*? failed: (.+)", message, re.DOTALL):
        return shortened(" ".join(found[1].split()), LINE)
    if found := re.match(r"(?:Group '(.+)' does not accept option|Option) '(.+?)'", message):
        return unknown(f"{found[1]}.{found[2]}" if found[1] else found[2], keys)
    if found := re.match(r'Parser key "([\w.]+)":\s+Expected a (.+?)\. Got value: (.*)', message, re.DOTALL):
        if found[3].strip() == "None":
            return f"'{found[1]}' must be given (expected {plain_types(found[2])})"
        return f"invalid value {printable(found[3].strip())} for '{found[1]}' (expected {plain_types(found[2])})"
    if found := CLASS.search(message):
        return shortened(f"{found[1]}: {' '.join(found[2].split())}", LINE)
    if found := re.match(r'Parser key "([\w.]+)":.*Subtypes: \[(.+?)\]\n.*Given value: (.*)', message, re.DOTALL):
        value = found[3].strip().splitlines()[0]
        return f"invalid value {shortened(value, LENGTH)} for '{found[1]}' (expected {plain_types(found[2]).replace(', ', ' or ')})"
    return shortened(" ".join(message.split()), LINE)


def plain_types(text: str) -> str:
    """Returns `text` with types in plain words: `<class 'int'>` as `int`, `<class 'NoneType'>` as `null`."""
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("NoneType", "null")
    return text.replace("typing.Literal", "one of ").replace("collections.abc.", "")
