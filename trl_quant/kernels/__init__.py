"""
Triton kernels. Each gives the same bits as its twin in plain torch, in `trl_quant.formats` or `layers`; `head`, which
only gradients and entropies need, nearly.
"""
