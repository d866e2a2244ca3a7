"""The torch side of the engine: weights, forward pass, KV tensors, sampling, and the public `LLM`.

On a CPU torch's OpenMP threads spin at every barrier, by default for so long that one other busy program
makes a two-thread step ten times slower. A shorter spin costs nothing measurable on a quiet machine (the
time between two parallel regions of a step is shorter still), so it is the default here; a value set by
the user stays. It is read once, when torch is first imported.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
