"""How good a map is, beside everything it could be mistaken for."""
