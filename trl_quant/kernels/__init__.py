"""
Triton kernels. Each has a twin in plain torch, in `trl_quant.formats` or `layers`, and gives the same bits. Only `head`
may differ from its twin in the last bits: nothing but gradients and entropies depends on it.
"""
