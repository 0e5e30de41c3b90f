"""What a model is made of: the names of its parameters, and which norm feeds which linear layers."""
