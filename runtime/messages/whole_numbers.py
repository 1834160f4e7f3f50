"""The check of options that are whole numbers, with one form of message."""

from typing import Any

from calib.runtime.messages.printable import printable

MOST = 2**30  # tokens, channels, pairs ...: more than any cache holds; a larger number is a typing error


def check_whole(name: str, number: Any, least: int, wanted: str, remedy: str = "", most: int = MOST) -> None:
    """Raises ValueError unless `number` is an int from `least` to `most`.

    Args:
        name: the option's name, for the message.
        number: its value; True and False are no numbers.
        least: the least value allowed.
        wanted: the words for what it must be, such as "a whole number of tokens, at least 1".
        remedy: text that follows the value in the message.
        most: the largest value allowed.

    Raises:
        ValueError: one line with the value, the range and the remedy.
    """
    if type(number) is not int or number < least:
        raise ValueError(f"{name} must be {wanted}, got {printable(number)}{remedy}")
    if number > most:
        raise ValueError(f"{name} must be a whole number, at most {most}, got {printable(number)}{remedy}")
