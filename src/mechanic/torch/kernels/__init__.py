"""The work that grows with the model, as functions over lists of tensors.

``eager`` is the reference. On CPUs it works on pieces that stay in the cache, elsewhere on whole lists (``whole``). The
kernels for GPUs in :mod:`mechanic.torch.gpu` must give the same results, up to rounding.
"""
