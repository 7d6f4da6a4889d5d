"""The operations of a forward pass, a file for each family."""
