"""A model server that is not there: one engine model, used live over HTTP and in simulated time."""
