"""`tidemill doctor`: what is wrong with a fleet that does not scale, and the command that mends it."""
