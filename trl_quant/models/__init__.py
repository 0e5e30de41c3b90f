"""The structure of models: families, names of parameters, norms and linear layers."""
