"""What models are made of: their families, the names of their parameters, their norms and their linear layers."""
