"""ONNX graphs of a method's arithmetic: tokens to packed fields, fields to tokens, and a decode step's attention over fields.

`graph.py` builds graphs. Most other modules are the ONNX counterpart of a module of `runtime/stages` or `kernels`: they read its
stages, bound to a layer by a method's plan, and write the same operations in the same order, with the same roundings. Packed
tokens are dicts of named tensors, the fields, as in the runtime. D is head_dim, T the number of tokens.
"""
