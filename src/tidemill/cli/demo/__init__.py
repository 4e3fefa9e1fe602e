"""`tidemill demo`: the whole on one machine."""
