"""Triton kernels, each equal bit for bit to its twin in plain torch in `trl_quant.formats`."""
