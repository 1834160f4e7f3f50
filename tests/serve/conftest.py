"""Engines that are not installed are stood in for before a test imports what plugs into them."""

from sglang_stand_in import stand_in

stand_in()
