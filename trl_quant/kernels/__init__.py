"""Triton kernels. Each has its twin in plain torch: a quantizer equals that of `trl_quant.formats` bit for bit."""
