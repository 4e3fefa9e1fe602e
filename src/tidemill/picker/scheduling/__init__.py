"""Who serves a request: screen, filter, score, pick. Pure: time and randomness come in."""
