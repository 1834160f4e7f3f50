"""The report of a run as one HTML file, drawn from what `results.json` holds.

page          the whole of it
overview      methods by columns, a table that sorting (the page's only script) orders
scatter       quality against true bits: axes, pareto (the front), labels (where names find room)
part_map      figures by depth or by layer, methods by parts
memory_bars   what the bits are spent on
"""
