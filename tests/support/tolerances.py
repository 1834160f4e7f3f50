"""Every tolerance of the tests, once, with its reason."""

import torch

# Attention over packed rows against attention over the decoded tokens in float64. Products of a few dozen float32 terms, a softmax
# and a mixture round to about 1e-6 of the largest value; rounding never exceeds ten times that, a wrong key, value or mask always
# does.
FLOAT32_ATTENTION = 1e-5

# The same in a model of 16 bits: the output itself is rounded to 8 (bfloat16) or 11 (float16) bits, half a unit each.
ATTENTION = {torch.float32: FLOAT32_ATTENTION, torch.bfloat16: 2**-8, torch.float16: 2**-10}

# Codes are computed in float32 and compared with float64: (x - z) / s has a relative error of 2^-22 at most and lies
# below 256 = 2^8, so a value closer than 2^-14 to the border between two levels may fall on either side; times four.
BORDER = 2**-12

# x^ = q s + z in float32 against float64: a product and a sum, each half a unit of 2^-23 of the largest term.
FLOAT32 = 2**-22

# Tokens decoded from a cache against the papers' formulas in float64, for values of order 1 to 10.
STORED = 1e-5

# The same for a sparse codec that encoded the tokens in batches of other shapes: correlations are rounded by the size of a product,
# so that for a tiny residual (of a vector that is itself an atom) it may choose other atoms.
TIED = 1e-3

# The share of values so near the border of two codes that float32 and float64 may choose differently.
ODD_CODES = 2e-4

# Logits of two runs of a whole float32 model that differ only by the order of sums, for logits of order 1 to 10.
LOGITS = 1e-3

# Logits of two runs through the same quantised cache whose attention rounds differently: the difference can push a value of
# the next layer over the border between two codes, and one code is a whole step. Seen: 2e-3.
LOGITS_ONE_CODE = 3e-2

# A transform and its inverse, or a fold, in float32: a handful of roundings, relative to the largest value.
FLOAT32_FOLD = 1e-5

# Predicted against measured bytes, as a share.
MEMORY = 0.01

# Logits of one forward of a two-layer model against the same forward in float64, both from the same stored tokens, relative
# to the largest logit. About 30 results are rounded one after another (norms, projections, rotation, residuals); as a
# random walk, and with the worst of a few hundred logits 4 times the usual one, that is some 32 units of rounding. In 16 bits
# a unit is 2^-9 (bfloat16) or 2^-11 (float16, including the loss in its subnormal numbers). In float32 it is 2^-24, times 8
# because each of the 64 or more terms of a sum is rounded as well, times 4 because the score of a packed key is the
# difference s (q.codes) - (-z) sum(q) of two products a few times its size.
FORWARD = {torch.float32: 2**-14, torch.bfloat16: 2**-4, torch.float16: 2**-6}

# Attention over codes by a kernel that multiplies codes with factors rounded to float16: scores relative to the sum of the
# magnitudes of their terms. Each rounded factor costs half a unit of 11 bits, 2^-12; keys with parameters by channel are converted
# to float16 as well, which is two roundings more. Together less than four times 2^-12.
ROUNDED_SCORES = 2**-10

# The same if a factor is split into two float16 numbers, 22 bits: the rounding of float32 sums remains. Codes of keys that are
# rotated have a bias; the largest, 64 for codes of one bit, makes half a unit of the last bit 2^-24 * 128 = 2^-17 of a score; times
# four for the sums over 16 planes. A factor of two bfloat16 numbers has 16 bits, which the interpreter truncates: 2^-16.
SPLIT_SCORES = 2**-15
