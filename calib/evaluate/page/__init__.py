"""The report of a run as one HTML file, made from the content of `results.json`.

page          the whole page
overview      a table of methods by columns that can be sorted (the page's only script)
scatter       quality against true bits: axes, pareto (the front), labels (positions of names)
part_map      figures by depth or by layer, as a table of methods by parts
memory_bars   bits per value by kind of memory
"""
