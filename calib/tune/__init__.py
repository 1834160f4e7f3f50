"""`calib tune`: choose a method's options, layer by layer, for a budget in true bits per value.

candidates   all combinations of a method's option grid that this model and artifact allow
loss         loss caused by errors of a layer's keys and values, from the artifact's measured sensitivities
bits         bits per value of a candidate's encoded tokens, as the runtime counts them
fetched      number of exact pairs that a method with host memory fetches for each step
measure      stores captured keys and values with every candidate in every layer, and measures bits and losses
allocation   one candidate for each layer within a budget: along the convex hulls, then greedily
result       a choice for each budget, the front, the best single setting; as a record of the artifact
page         the front as a chart and tables; tracking logs the same to Weights & Biases
"""
