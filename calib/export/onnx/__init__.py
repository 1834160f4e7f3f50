"""ONNX graphs of a method's arithmetic: tokens to packed fields, fields to tokens, and a decode step's attention over fields.

`graph.py` is how a graph is written; every other file is the twin of one of `runtime/stages` or `kernels`, whose stages (bound
to a layer by a method's plan) it reads, and writes the same operations in the same order, rounding by rounding.
"""
